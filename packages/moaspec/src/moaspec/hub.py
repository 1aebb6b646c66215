"""Models and data sets of the hub."""

import errno
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moaspec_core.errors import DataError, HubError
from moaspec_core.support.causes import first_line
from moaspec_core.support.extras import require
from moaspec_core.support.proxies import require_proxies

HUB = "hub:"  # `hub:owner/name`, `hub:owner/name@split`, `hub:owner/name:configuration@split`


PROBE_S = 5.0  # how long the hub may take to answer before its local cache is used instead
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def cached_if_offline(hub_id: str) -> Path | None:
    """The local copy of a model where the hub cannot be reached; None where it answers.

    The hub's client would try for half a minute for each file.

    Raises:
        HubError: the hub cannot be reached, and no copy is there.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        require_proxies()
        HfApi().model_info(hub_id, timeout=PROBE_S)
    except HfHubHTTPError:  # the hub answered; the download will report the error
        return None
    # The hub's client passes on errors of its HTTP library, which change with versions.
    except Exception as error:
        config = try_to_load_from_cache(hub_id, "config.json")
        if isinstance(config, str):
            return Path(config).parent
        raise HubError(
            f"The hub at {HfApi().endpoint} cannot be reached, or what answers there is none "
            f"({first_line(error)})."
        ) from error
    return None


def download(hub_id: str, name: str, file: Path, size: int) -> None:
    """Append to a file what it lacks of one of the hub; what came before an error stays.

    The hub's own download begins anew in each process.

    Args:
        size: of the whole file, in bytes.

    Raises:
        HubError: the hub cannot be reached or does not give it.
        OSError: the disk is full.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    cached_if_offline(hub_id)
    try:
        with file.open("ab") as whole:
            http_get(
                hf_hub_url(hub_id, name),
                whole,
                resume_size=whole.tell(),
                headers=build_hf_headers(),
                expected_size=size,
            )
    # The hub's client passes on errors of its HTTP library, which change with versions.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise
        raise HubError(
            f"The hub does not give {name} of {hub_id} ({first_line(error).rstrip('.')})."
        ) from error


def hub_rows(source: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set, fetched as they are asked for; of the split "train" if none is named.

    Raises:
        InputError: `datasets` is not installed, or a proxy cannot be used.
        DataError: the hub cannot be asked, or has no such data set, configuration or split.
    """
    name, _, split = source.removeprefix(HUB).partition("@")
    name, _, configuration = name.partition(":")
    if not name or source.endswith("@"):
        raise DataError(
            f"{source!r} names no data set; write {HUB}OWNER/NAME, {HUB}OWNER/NAME@SPLIT or "
            f"{HUB}OWNER/NAME:CONFIGURATION@SPLIT."
        )
    require_datasets()
    require_proxies()
    load = importlib.import_module("datasets").load_dataset
    try:
        rows = load(name, configuration or None, split=split or "train", streaming=True)
        for row in rows:
            yield dict(row)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"Cannot read the data set {source!r} of the hub: {error}") from error


def require_datasets() -> None:
    """Raise InputError where the package `datasets` is not installed."""
    require("A data set of the hub", "moaspec[data]")
