"""The model's configuration; see ``dsv4.config.model_config``."""

from __future__ import annotations

from dsv4.config.dspark import DSparkConfig as DSparkConfig
from dsv4.config.layer_types import CSA as CSA
from dsv4.config.layer_types import HCA as HCA
from dsv4.config.layer_types import LAYER_TYPES as LAYER_TYPES
from dsv4.config.layer_types import MLP_LAYER_TYPES as MLP_LAYER_TYPES
from dsv4.config.layer_types import SLIDING as SLIDING
from dsv4.config.layer_types import CompressRates as CompressRates
from dsv4.config.model_config import ACTIVATIONS as ACTIVATIONS
from dsv4.config.model_config import NUMERICS as NUMERICS
from dsv4.config.model_config import ModelConfig as ModelConfig
from dsv4.config.rope_parameters import RopeParameters as RopeParameters
