"""The plan of a shard, kept while the tensors stay what they are: then only the header is written anew."""

from __future__ import annotations

from collections.abc import Sequence

from midwatch.checkpoint.image import ImagePlan, ShardIdentity, TensorSpec, plan_image, replan_image, shard_metadata
from midwatch.checkpoint.layout import Piece, dtype_name


class PlanMemo:
    """Plans one rank's saves. The fingerprint has every key, dtype, shape and place: a new tensor makes a new plan."""

    def __init__(self) -> None:
        self._fingerprint: list[tuple[object, ...]] = []
        self._specs: list[TensorSpec] = []
        self._plan: ImagePlan | None = None

    def plan(self, pieces: Sequence[Piece], identity: ShardIdentity, state_json: str) -> ImagePlan:
        """Where each piece goes, and the header that says so.

        Raises:
            CheckpointError: CK304 for a tensor the format cannot hold.
        """
        fingerprint: list[tuple[object, ...]] = [
            (p.key, p.tensor.dtype, p.tensor.shape, p.offsets, p.global_shape) for p in pieces
        ]
        if self._plan is not None and fingerprint == self._fingerprint:
            metadata = shard_metadata(identity, self._specs, state_json)
            self._plan = replan_image(self._plan, metadata=metadata)
            return self._plan
        specs = [_spec(piece) for piece in pieces]
        self._plan = plan_image(specs, metadata=shard_metadata(identity, specs, state_json))
        self._fingerprint, self._specs = fingerprint, specs
        return self._plan


def _spec(piece: Piece) -> TensorSpec:
    return TensorSpec(
        key=piece.key,
        dtype=dtype_name(piece.key, piece.tensor.dtype),
        shape=tuple(piece.tensor.shape),
        offsets=piece.offsets,
        global_shape=piece.global_shape,
    )
