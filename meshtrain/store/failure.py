"""Why a checkpoint could not be written, in one line that names the disk."""

import errno
import os
import re
import shutil
from pathlib import Path

from meshtrain.words.errors import SaveFailed
from meshtrain.words.tables import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CODE = re.compile(r"os_error_code='(\d+)'")  # how TensorStore quotes the system's error, behind a long path
_MAX_REASON = 300  # characters of what a library says, which may quote whole stacks


def save_failed(directory: Path, error: BaseException) -> SaveFailed:
    """Returns the exception for a failed save. Call it before deleting the save's files, to report the free space.

    Args:
      directory: the checkpoint's folder.
      error: what the library raised.
    """
    disk = f" ({free})" if (free := free_space(directory)) else ""
    return SaveFailed(
        f"checkpoint {directory}: not written: {reason(error)}{disk}; nearest: free space there, or another --workdir"
    )


def reason(error: BaseException) -> str:
    """Returns the system's message if the disk is full or TensorStore has its error code, else the library's, cut."""
    quoted = _CODE.search(str(error))
    if quoted:
        return os.strerror(int(quoted[1]))
    if isinstance(error, OSError) and error.errno in _FULL:
        return os.strerror(error.errno)
    return " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__


def free_space(directory: Path) -> str:
    """Returns `12.0 MiB free on /mount/point` for the disk of a directory, which need not exist; "" if unknown."""
    path = directory.absolute()
    try:
        while not os.path.ismount(path):
            path = path.parent
        return f"{format_bytes(shutil.disk_usage(path).free)} free on {path}"
    except OSError:
        return ""
