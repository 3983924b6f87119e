"""Lightning's own launcher kills all ranks on a node, up to 5 s after one of them ended badly, whatever they are doing.

Ranks end by themselves here, with the cause in their output and perhaps a checkpoint to finish, so it has to wait.
"""

from __future__ import annotations

import threading
import time

_NAME = "child-process-observer"


def let_ranks_end(seconds: float) -> None:
    """Lightning's observer, if there is one in this process, waits so long before it kills."""
    for observer in threading.enumerate():
        terminate = getattr(observer, "_terminate_all", None)
        if observer.name == _NAME and terminate is not None and "_terminate_all" not in vars(observer):

            def later(terminate=terminate) -> None:
                time.sleep(seconds)
                terminate()

            observer._terminate_all = later  # type: ignore[attr-defined]
