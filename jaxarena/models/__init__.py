"""Language models built of :mod:`jaxarena.ops`: plain functions over pytrees of parameters."""
