"""Report: the frames, charts and evidence that pages of the book show.

Called, `mxfp4.report(model)` is `mxfp4.layers.report.report`, a model's own report. The function and this folder have
one name, and importing the folder takes the function's place in `mxfp4`.
"""

from __future__ import annotations

import sys
from types import ModuleType


class _Callable(ModuleType):
    def __call__(self, model):
        from mxfp4.layers.report import report

        return report(model)


sys.modules[__name__].__class__ = _Callable
