"""The public address of `mxfp4.adapters.torchtitan`: one module under two names."""

import sys

from mxfp4.adapters import torchtitan

sys.modules[__name__] = torchtitan
