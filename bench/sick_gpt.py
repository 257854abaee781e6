"""Ways in which training goes wrong, done to a run that is well: for ``healthy_gpt.py``."""

from __future__ import annotations

from typing import Any

import torch

SICK: dict[str, str] = {
    "corrupt_1step": "one batch of random tokens",
    "corrupt_10step": "ten of them",
    "half_constant_15step": "half of the rows are one token, fifteen steps",
    "label_shift": "targets one token too far, from then on",
    "zero_loss": "the loss is exactly 0, as where every target is left out",
    "nan_rank1": "the loss of rank 1 is NaN",
    "lr_spike_x30_3step": "learning rate times 30, three steps",
    "lr_drop": "learning rate to 0.3 %",
    "resume_no_optimizer": "Adam's state is lost at the resume",
    "resume_no_scheduler": "the schedule begins again at the resume",
    "resume_stale_weights": "weights of step 180 under step 400",
    "resume_rewound_data": "the loader begins again at the resume",
}

MUST_BE_SEEN: dict[str, tuple[str, str, int]] = {
    "corrupt_1step": ("spike", "note", 1),
    "corrupt_10step": ("spike", "trip", 9),
    "label_shift": ("level_rise", "incident", 80),
    "zero_loss": ("zero_loss", "trip", 0),
    "nan_rank1": ("nonfinite", "trip", 0),
    "lr_spike_x30_3step": ("lr_off_plan", "incident", 0),
    "lr_drop": ("lr_off_plan", "incident", 0),
    "resume_no_optimizer": ("update_jump", "incident", 0),
    "resume_no_scheduler": ("lr_off_plan", "incident", 0),
    "resume_stale_weights": ("weights_jump", "incident", 0),
    "resume_rewound_data": ("data_repeated", "note", 0),
}
"""Fault -> the rule that was built for it, its tier, and so many steps after the event at most. A loss of 256 tokens a
step is so noisy that shifted targets stay inside of its band; they show in its level."""

LASTS = {"corrupt_1step": 1, "corrupt_10step": 10, "half_constant_15step": 15, "lr_spike_x30_3step": 3, "zero_loss": 10}
"""Steps; others go on."""


class Sickness:
    """One fault from one step on; none where ``kind`` is empty."""

    def __init__(self, kind: str, event: int, rank: int) -> None:
        self._kind = kind
        self._event = event
        self._is_victim = rank == 1
        self._source = torch.Generator().manual_seed(7)

    def is_on(self, step: int) -> bool:
        return bool(self._kind) and 0 <= step - self._event < LASTS.get(self._kind, 10**9)

    def after_resume(self, model: Any, optimizer: Any, scheduler: Any, loader: Any, stale_weights: str) -> None:
        """What a resume forgets, or takes from elsewhere."""
        if self._kind == "resume_no_optimizer":
            optimizer.state.clear()
        elif self._kind == "resume_no_scheduler":
            scheduler.last_epoch = 0
            for group, base, rate in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                group["lr"] = base * rate(0)
        elif self._kind == "resume_stale_weights":
            model.load_state_dict(torch.load(stale_weights, weights_only=True))
        elif self._kind == "resume_rewound_data":
            loader.load_state_dict({"epoch": 0, "cursor": 0})

    def batch(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_on(step):
            return inputs, targets
        if self._kind.startswith("corrupt"):
            noise = torch.randint(0, 256, (inputs.shape[0], inputs.shape[1] + 1), generator=self._source)
            return noise[:, :-1], noise[:, 1:]
        if self._kind == "half_constant_15step":
            inputs, targets = inputs.clone(), targets.clone()
            inputs[: len(inputs) // 2] = targets[: len(targets) // 2] = 32
        if self._kind == "label_shift":
            targets = torch.cat([targets[:, 1:], targets[:, -1:]], dim=1)
        return inputs, targets

    def loss(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        if self.is_on(step) and self._kind == "zero_loss":
            return loss * 0
        if self.is_on(step) and self._kind == "nan_rank1" and self._is_victim:
            return loss * float("nan")
        return loss

    def rates(self, step: int, optimizer: Any) -> None:
        """Called between the backward pass and the optimizer's step; the scheduler sets the next one anew."""
        factor = {"lr_spike_x30_3step": 30.0, "lr_drop": 0.003}.get(self._kind)
        if factor is not None and self.is_on(step):
            for group in optimizer.param_groups:
                group["lr"] *= factor
