"""The public address of `mxfp4.adapters.huggingface`: one module under two names."""

import sys

from mxfp4.adapters import huggingface

sys.modules[__name__] = huggingface
