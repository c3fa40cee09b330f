"""`txl serve`: runs over HTTP."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transformer_xl.apps.serve.config import ServerConfig
from transformer_xl.cli.flags import check_flags, optional_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags
from transformer_xl.config.extras import missing_extra

ServeFlags = optional_flags("serve", ServerConfig.model_fields)


def serve(
    run: Path,
    /,
    *more_runs: Path,
    settings: Annotated[ServeFlags | None, Parameter(name="*", negative=())] = None,
    checkpoint: Literal["best", "last"] = "best",
    device_options: DeviceFlags = DEFAULT_DEVICE,
) -> int:
    """Serve runs over HTTP with OpenAI's API, and sessions whose memory stays on the server.

    Parameters
    ----------
    run
        Folder of a run; the name of the folder is the name of the model.
    more_runs
        Folders of further runs.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    """
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise missing_extra(missing[0], "serve")
    config = check_flags(ServerConfig, settings)
    # before torch loads libgomp: threads that spin while they wait take the cores that other programs would leave
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from transformer_xl.apps.serve.server import serve as serve_runs

    return serve_runs([run, *more_runs], config, device=str(device_options.choose()), checkpoint=checkpoint)
