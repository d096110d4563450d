"""What is minimised: each objective maps (model, weights, batch) to a summed loss and its counts. The step uses it."""

from podtune.objectives.language import sft_loss

OBJECTIVES = {"sft": sft_loss}
