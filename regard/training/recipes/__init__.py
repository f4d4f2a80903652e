"""Training objectives, one file each: a recipe with `rows`, `batch` and `loss`."""

from regard.training.recipes.classification import TextClassification, TokenClassification
from regard.training.recipes.clm import CausalLM
from regard.training.recipes.contrastive import Contrastive
from regard.training.recipes.image_classification import ImageClassification
from regard.training.recipes.infilling import Infilling
from regard.training.recipes.mlm import MaskedLM
from regard.training.recipes.question_answering import QuestionAnswering
from regard.training.recipes.recipe import Batch, Recipe
from regard.training.recipes.span_corruption import SpanCorruption
from regard.training.recipes.translation import Translation

__all__ = [
    "RECIPES",
    "Batch",
    "CausalLM",
    "Contrastive",
    "ImageClassification",
    "Infilling",
    "MaskedLM",
    "QuestionAnswering",
    "Recipe",
    "SpanCorruption",
    "TextClassification",
    "TokenClassification",
    "Translation",
]

RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe
    for recipe in (
        CausalLM,
        MaskedLM,
        SpanCorruption,
        Infilling,
        Translation,
        TextClassification,
        TokenClassification,
        QuestionAnswering,
        ImageClassification,
        Contrastive,
    )
}
"""By the name of the command, `regard train NAME`."""
