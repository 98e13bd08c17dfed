"""Whether a model draws random numbers in evaluation mode: runs that draw others cannot be compared."""

from __future__ import annotations

from .agreement import disagreements
from .outcome import NotApplicableError
from .trial import Trial


def check_not_random(trial: Trial) -> None:
    """Refuse to call broken what draws other numbers in another dtype, on another device or for another batch.

    Raises:
        NotApplicableError: In evaluation mode another seed gives another output, beyond rounding.
    """
    one = trial.reference(mode="eval")
    for seed in ("second", "third"):
        found = disagreements(one, trial.other(mode="eval", seed=seed), integers=True)
        if found:
            raise NotApplicableError(
                f"random in evaluation: another seed changes what {found[0].given.layer} gives out"
            )
