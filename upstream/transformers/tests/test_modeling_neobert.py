"""Common model tests of transformers for NeoBERT, for tests/models/neobert/ of transformers."""

import unittest

from transformers import (
    NeoBertConfig,
    NeoBertForMaskedLM,
    NeoBertForMultipleChoice,
    NeoBertForQuestionAnswering,
    NeoBertForSequenceClassification,
    NeoBertForTokenClassification,
    NeoBertModel,
)
from transformers.testing_utils import require_torch

from ...test_configuration_common import ConfigTester
from ...test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from ...test_pipeline_mixin import PipelineTesterMixin


class NeoBertModelTester:
    def __init__(self, parent):
        self.parent = parent
        self.batch_size = 5
        self.seq_length = 7
        self.num_choices = 4
        self.is_training = True
        self.hidden_size = 32
        self.num_hidden_layers = 2
        self.num_attention_heads = 4
        self.vocab_size = 99
        self.num_labels = 3

    def get_config(self):
        return NeoBertConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=48,
            max_position_embeddings=128,
            classifier_dropout=0.0,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 1) + 1
        mask = random_attention_mask([self.batch_size, self.seq_length])
        return self.get_config(), {"input_ids": input_ids, "attention_mask": mask}


@require_torch
class NeoBertModelTest(ModelTesterMixin, PipelineTesterMixin, unittest.TestCase):
    all_model_classes = (
        NeoBertModel,
        NeoBertForMaskedLM,
        NeoBertForSequenceClassification,
        NeoBertForTokenClassification,
        NeoBertForQuestionAnswering,
        NeoBertForMultipleChoice,
    )
    pipeline_model_mapping = {
        "feature-extraction": NeoBertModel,
        "fill-mask": NeoBertForMaskedLM,
        "text-classification": NeoBertForSequenceClassification,
        "token-classification": NeoBertForTokenClassification,
        "zero-shot": NeoBertForSequenceClassification,
    }

    def setUp(self):
        self.model_tester = NeoBertModelTester(self)
        self.config_tester = ConfigTester(self, config_class=NeoBertConfig, hidden_size=32, num_attention_heads=4)

    def test_config(self):
        self.config_tester.run_common_tests()
