"""Defines classes named as T5X's model and this package's, for gin files without T5X."""


class EncoderDecoderModel:
    def __init__(self, module=None, decode_fn=None, feature_converter_cls=None, z_loss=0.0):
        self.module = module

    def predict_batch_with_aux(self, num_decodes=1, decoder_params=None, prompt_with_targets=False):
        return num_decodes


class SpeculativeEncoderDecoderModel(EncoderDecoderModel):
    def __init__(self, module=None, drafter=None, gamma=None, config=None, z_loss=0.0):
        super().__init__(module)
        self.drafter = drafter

    def predict_batch_with_aux(self, num_decodes=1, decoder_params=None):
        return num_decodes


class GenerationConfig:
    def __init__(self, gamma=None, verifier=None):
        self.gamma = gamma


def infer(model=None):
    return model
