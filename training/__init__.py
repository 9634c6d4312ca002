"""Recipes: pre-training, its ablation ladder, GLUE and contrastive fine-tuning."""
