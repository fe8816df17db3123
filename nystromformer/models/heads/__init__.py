"""Heads: what a model answers."""

from nystromformer.models.heads.masked_lm import NystromformerForMaskedLM
from nystromformer.models.heads.multiple_choice import NystromformerForMultipleChoice
from nystromformer.models.heads.pretraining import NystromformerForPreTraining, NystromformerForPreTrainingOutput
from nystromformer.models.heads.question_answering import NystromformerForQuestionAnswering
from nystromformer.models.heads.sequence_classification import NystromformerForSequenceClassification
from nystromformer.models.heads.token_classification import NystromformerForTokenClassification

__all__ = [
    "NystromformerForMaskedLM",
    "NystromformerForMultipleChoice",
    "NystromformerForPreTraining",
    "NystromformerForPreTrainingOutput",
    "NystromformerForQuestionAnswering",
    "NystromformerForSequenceClassification",
    "NystromformerForTokenClassification",
]
