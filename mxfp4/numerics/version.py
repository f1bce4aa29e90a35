"""The version of everything that decides a result's bytes.

Raise SEMANTICS_VERSION whenever quantized bytes or a training step change on purpose. Run records carry it in their
key, so results from before and after are never mixed; tests/numerics/test_golden.py fails when the bytes change and
this number does not.
"""

SEMANTICS_VERSION = 1
