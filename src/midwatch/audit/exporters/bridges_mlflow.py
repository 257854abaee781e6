"""MLflow: a run for each attempt, nested below one for the run.

The library finds the server as it always does (``MLFLOW_TRACKING_URI`` and its credentials), unless one is named.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from midwatch.audit.exporters.bridges import Row, TrackerRun
from midwatch.audit.exporters.sink import SinkAwayError, SinkRefusedError
from midwatch.core import SYSTEM_CLOCK, ConfigError, load_extra, printable

_MOST_METRICS: Final = 1000
"""Of one request. Source: MLflow, REST API, "Log Batch": request limits."""
_LONGEST_NAME: Final = 250
_ODD: Final = re.compile(r"[^\w\-. :/]")
_KEY: Final = "midwatch.key"
_NEWEST: Final = "midwatch.newest_step"
"""A tag, written with the points: MLflow has no quick way to ask for the newest step."""
_REFUSED: Final = "INVALID_PARAMETER_VALUE"


class MlflowTracker:
    """One experiment."""

    def __init__(self, experiment: str, uri: str = "") -> None:
        """Nothing is connected yet.

        Args:
            uri: Of the tracking server or database; empty: the library's own.

        Raises:
            ConfigError: CF107 the library is not installed, or what it needs for this kind of ``uri``.
        """
        self._mlflow = load_extra("mlflow", "mlflow", "--to mlflow")
        self._entities = load_extra("mlflow.entities", "mlflow", "--to mlflow")
        self._experiment = experiment
        self._uri = uri
        self._client: Any = None
        self._experiment_id = ""
        self._run_id = ""
        self._last_ms = 0
        self._group_id = ""
        # What stands before an @ is a password.
        self.name = f"mlflow:{experiment}" + (f":{uri.rpartition('@')[2]}" if uri else "")

    def open(self, run: TrackerRun) -> int | None:
        """See ``Tracker``."""
        self.close()
        with self._speaking() as client:
            if not self._experiment_id:
                known = client.get_experiment_by_name(self._experiment)
                self._experiment_id = known.experiment_id if known else client.create_experiment(self._experiment)
            tags = {"mlflow.parentRunId": self._group(client, run), "midwatch.run": run.run}
            tags |= {f"midwatch.{name}": str(value) for name, value in run.facts.items() if name != "run"}
            found = self._find(client, run.key) or self._create(client, run.key, run.place, tags)
            self._run_id = found.info.run_id
            if found.info.status != "RUNNING":
                client.update_run(self._run_id, status="RUNNING")
            newest = found.data.tags.get(_NEWEST, "")
        return int(newest) if newest.lstrip("-").isdecimal() else -1

    def write(self, rows: Sequence[Row]) -> None:
        """See ``Tracker``. Durability: MLflow has the rows when this returns."""
        with self._speaking() as client:
            for metrics, newest in self._requests(rows):
                tags = [self._entities.RunTag(_NEWEST, str(newest))] if newest is not None else []
                client.log_batch(self._run_id, metrics=metrics, tags=tags)
        self._last_ms = max((row.ts_ns // 10**6 for row in rows), default=0) or self._last_ms

    def close(self) -> None:
        """See ``Tracker``."""
        run_id, self._run_id = self._run_id, ""
        if run_id:
            with self._speaking() as client:
                client.set_terminated(run_id, status="FINISHED", end_time=self._last_ms or None)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _requests(self, rows: Sequence[Row]) -> Iterator[tuple[list[Any], int | None]]:
        """Metrics of one request, and the newest step that is whole with it."""
        metrics: list[Any] = []
        whole: int | None = None
        for row in rows:
            ts_ms = row.ts_ns // 10**6 or SYSTEM_CLOCK.wall_ns() // 10**6
            for name, value in row.values.items():
                if len(metrics) == _MOST_METRICS:
                    yield metrics, whole
                    metrics = []
                metrics.append(self._entities.Metric(metric_name(name), value, ts_ms, row.step))
            whole = row.step
        yield metrics, whole

    def _group(self, client: Any, run: TrackerRun) -> str:
        if not self._group_id:
            tags = {"midwatch.run": run.run}
            found = self._find(client, run.group) or self._create(client, run.group, run.name or run.group, tags)
            self._group_id = found.info.run_id
            if found.info.status == "RUNNING":
                # It only holds the others together.
                client.set_terminated(self._group_id, status="FINISHED")
        return self._group_id

    def _find(self, client: Any, key: str) -> Any:
        # Keys are made of characters that need no quoting.
        found = client.search_runs([self._experiment_id], filter_string=f"tags.`{_KEY}` = '{key}'", max_results=1)
        return found[0] if found else None

    def _create(self, client: Any, key: str, name: str, tags: dict[str, str]) -> Any:
        return client.create_run(self._experiment_id, tags={_KEY: key, **tags}, run_name=name)

    def _speaking(self) -> _Speaking:
        if self._client is None:
            try:
                self._client = self._mlflow.MlflowClient(tracking_uri=self._uri or None)
            except ImportError as error:
                raise ConfigError(
                    "CF107",
                    f"--to mlflow with this address needs {error.name}, which is not installed",
                    hint="pip install mlflow",
                    module=str(error.name),
                ) from error
        return _Speaking(self._client, self._mlflow.exceptions.MlflowException)


class _Speaking:
    """What the library raises, in our words."""

    def __init__(self, client: Any, kind: type[Exception]) -> None:
        self._client = client
        self._kind = kind

    def __enter__(self) -> Any:
        return self._client

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, self._kind):
            is_refused = getattr(error, "error_code", "") == _REFUSED
            raise (SinkRefusedError if is_refused else SinkAwayError)(f"mlflow: {printable(error)}") from error
        if isinstance(error, OSError):
            raise SinkAwayError(f"mlflow: {printable(error)}") from error


def metric_name(name: str) -> str:
    """A name that MLflow takes: letters, digits, ``_ - . :`` space and ``/``, in the form of a plain path."""
    plain = posixpath.normpath(_ODD.sub("_", name).lstrip("/") or "_")
    return (plain if not plain.startswith("..") else f"_{plain[2:]}")[:_LONGEST_NAME]
