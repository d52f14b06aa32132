#!/bin/sh
# Prints the extra of pyproject.toml that fits this machine's NVIDIA driver: cuda12, cuda13, or nothing without a driver.
#
# nvidia-smi's header tells the newest CUDA that the driver serves; a driver for CUDA 13 or later gets the newest extra there is.

set -u

PATH="$PATH:/usr/lib/wsl/lib"
command -v nvidia-smi >/dev/null 2>&1 || exit 0
major=$(nvidia-smi 2>/dev/null </dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
case "$major" in
    '') echo "nvidia-smi names no CUDA version: installing JAX for the CPU" >&2 ;;
    [0-9] | 1[01]) echo "the NVIDIA driver serves CUDA $major, and JAX needs 12 or later: installing JAX for the CPU" >&2 ;;
    12) echo cuda12 ;;
    *) echo cuda13 ;;
esac
