"""DistilBERT: half of BERT's layers, without token types (V. Sanh et al., 2019)."""

from headrace.checkpoint.family import EmbeddingOptions, Encoder, EncoderOptions, Family
from headrace.families.bert import DEFAULTS, EMBEDDINGS

FAMILY = Family(
    encoders={
        "distilbert": Encoder(
            name="distilbert",
            prefix="distilbert.",
            defaults=DEFAULTS | {"num_hidden_layers": 6, "type_vocab_size": 0},
            common_names={
                "dim": "hidden_size",
                "n_layers": "num_hidden_layers",
                "n_heads": "num_attention_heads",
                "hidden_dim": "intermediate_size",
                "activation": "hidden_act",
            },
            embeddings=EmbeddingOptions(words=EMBEDDINGS.words, norm=EMBEDDINGS.norm, positions=EMBEDDINGS.positions),
            blocks=EncoderOptions(
                layers="transformer.layer",
                qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
                out="attention.out_lin",
                attention_norm="sa_layer_norm",
                up="ffn.lin1",
                down="ffn.lin2",
                mlp_norm="output_layer_norm",
            ),
            head=("pre_classifier", "classifier"),
            head_activation="relu",
            unused=("position_ids", "vocab_", "classifier."),
            norm_eps=1e-12,
        )
    }
)
