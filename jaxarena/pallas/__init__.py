"""Pallas (Mosaic GPU) kernels for Hopper GPUs, one file a launch family, and what they share.

**Kernels.** Every family has a function that runs one launch, and ``supports``, which says why it would not::

    quantize.quantize_rows(arena, x, out, m=, k=)                           rows to int8 words and scales, one word or two
    quantize.quantize_columns(arena, x, out, m=, k=)                        columns, and the words transposed
    quantize_tiles.quantize_tiles(arena, w, out, k=, n=)                    weights, in both orientations
    dequantize.dequantize_rows(arena, x, out, m=, k=)                       rows of words to bf16
    project_int8.project_int8(arena, x, weight, weight_scales, out, m=, n=, k=)        words times words, one word each
    project_two_words.project_two_words(arena, x, weight, weight_scales, out, m=, n=, k=)   two words each
    project_bf16.project_bf16(arena, rows, columns, out, m=, n=, k=)        bf16 products: forward, dx and dw
    project_backward.dx_int8(...), dweight_int8(...)                        gradients in words: project_int8 of other operands
    project_kept.dweight_kept(arena, x, dy, out, m=, n=, k=)                dw in bf16 from rows kept as words

- ``arena`` is the ref of the step's int8 ``[rows, 128]`` buffer, ``jax.new_ref(buffer)``: kernels read and write it in place, and the
  buffer after all launches is ``ref[...]``. It may be None when no operand lies there.
- An operand is an array or a :class:`~jaxarena.pallas.operands.Place` in the arena, whose numbers may be traced: a kernel compiles once
  for its sizes and config, wherever its operands lie. ``out`` is a place, or None for a result of its own.
- ``config`` overrides ``config_for``, which takes what :mod:`~jaxarena.pallas.configs` was given for the product, by hand or by
  ``python -m jaxarena tune``, else chooses from the family's table ``CONFIGS`` (and ``DECODE``, for up to 64 rows).
- ``supports(sizes, where operands lie)`` returns None when the kernel takes the launch, else the reason in words; a kernel called
  regardless raises ValueError with it.

**Shared.** ``operands``: places, addresses, block scales. ``tiles``: shared memory, bytes seen as numbers. ``codes``: numbers to words in
registers, and tiles transposed. ``products``: tensor-core products without cleared accumulators. ``frame``: the walk over output tiles, the
pipeline, the way results go out. ``configs``: which config a launch takes. ``tuning``: the search for a faster one.

Every kernel also runs in Pallas' interpret mode (``interpret=True``), which looks for races; the twins for what that lacks are in
``tiles`` and ``products``, so that a kernel's body is the same in both.
"""
