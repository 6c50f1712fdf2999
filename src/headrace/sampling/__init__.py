"""From logits to token ids: parameters, penalties, the sampler, logprobs, custom logit processors."""
