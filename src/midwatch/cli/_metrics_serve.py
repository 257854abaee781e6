"""``midwatch metrics serve``: the page for Prometheus made from a run folder alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import click

from midwatch.audit import read_run
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.cli._places import checkpoint_folder, run_folder
from midwatch.config import expand_path, load_config


@click.command(
    "serve",
    epilog=exits(65, 74, 78, e65="no run there", e74="nobody can listen there")
    + " Example: midwatch metrics serve RUN --listen 9400",
)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--listen", metavar="HOST:PORT", help="Where; a port alone is on loopback. Default: metrics.listen.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="The TOML file of the run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; may be repeated.")
@json_option
def serve(run: Path, *, listen: str | None, config_file: Path | None, overrides: Sequence[str], is_json: bool) -> None:
    """Answer Prometheus for the run in the folder RUN until interrupted: GET /metrics and GET /healthz.

    For a run without midwatch's supervisor, or one that is over. A live one under midwatch run serves its own page,
    with more in it, where metrics.listen says so. Nothing in the run folder is changed.
    """
    # What a page needs is much, and the other verbs of metrics need none of it.
    from midwatch.audit.exporters import Listen
    from midwatch.supervise import FolderFamilies, serve_folder

    folder, config = run_folder(run), load_config(config_file, overrides).metrics
    chosen = listen if listen is not None else config.listen
    if not chosen:
        raise click.UsageError("say where: --listen HOST:PORT, or metrics.listen")
    info = read_run(folder)
    index_dir = expand_path("metrics.index_dir", config.index_dir) if config.index_dir else None
    families = FolderFamilies(folder, info.run if info else "", checkpoint_folder(folder), index_dir)

    def told(address: str) -> None:
        url = f"http://{address}/metrics"
        show_json({"url": url, "run_dir": str(folder)}, is_line=True) if is_json else say(f"metrics at {plain(url)}")

    asyncio.run(serve_folder(families, Listen(chosen), told))
