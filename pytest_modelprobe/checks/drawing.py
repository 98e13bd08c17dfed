"""Whether a model is random in evaluation mode: such runs cannot be compared."""

from __future__ import annotations

from .agreement import disagreements
from .outcome import NotApplicableError
from .trial import Trial


def check_not_random(trial: Trial) -> None:
    """Check that the output in evaluation mode does not depend on the seed.

    Raises:
        NotApplicableError: In evaluation mode another seed gives another output, beyond rounding.
    """
    one = trial.reference(mode="eval")
    for seed in ("second", "third"):
        found = disagreements(one, trial.variation(mode="eval", seed=seed), integers=True)
        if found:
            raise NotApplicableError(
                f"random in evaluation: another seed changes what {found[0].layer_tensor.layer} returns"
            )
