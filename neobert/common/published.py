"""Figures of the paper (arXiv 2502.19587v2), shown in tables beside measured ones."""

MTEB_TYPES = {
    "Classification": "Class",
    "Clustering": "Clust",
    "PairClassification": "PairClass",
    "Reranking": "Rerank",
    "Retrieval": "Retr",
    "STS": "STS",
    "Summarization": "Summ",
}

# Table 4: MTEB(eng, v1) after 2,000 steps of contrastive training. The columns are those of
# MTEB_TYPES, and the mean over the 56 tasks.
MTEB = {
    "BERT base": (60.6, 37.0, 71.5, 48.9, 28.3, 69.9, 31.1, 48.1),
    "RoBERTa base": (58.7, 36.7, 71.2, 49.8, 26.9, 71.8, 29.1, 47.7),
    "DeBERTaV3 base": (45.9, 15.2, 44.3, 39.0, 3.5, 42.2, 25.0, 26.9),
    "NomicBERT-2048": (55.0, 35.3, 69.0, 48.8, 30.5, 70.1, 30.1, 47.1),
    "ModernBERT base": (58.9, 38.1, 63.8, 48.5, 21.0, 66.2, 30.1, 45.0),
    "NeoBERT-4096": (61.6, 40.8, 76.2, 51.2, 31.6, 74.8, 30.7, 51.3),
    "BERT large": (59.8, 39.3, 70.9, 49.7, 29.6, 71.4, 31.2, 49.1),
    "RoBERTa large": (57.1, 39.3, 72.5, 51.3, 30.0, 71.7, 31.1, 48.9),
    "DeBERTaV3 large": (45.9, 16.4, 45.0, 40.8, 4.0, 40.1, 29.9, 27.1),
    "ModernBERT large": (62.4, 38.7, 65.5, 50.1, 23.1, 68.3, 27.8, 46.9),
}
MTEB_NOTE = (
    "Published rows: arXiv 2502.19587v2, Table 4, MTEB(eng, v1), one contrastive recipe of 2,000 "
    "steps for every backbone; "
    "the authors' code leaves CQADupstack and MSMARCO out of the averages it computes, ours does "
    "not."
)

# Table 3: development sets of GLUE, one score per task in the order of GLUE_TASKS, and the mean.
GLUE_TASKS = ("MNLI", "QNLI", "QQP", "RTE", "SST", "MRPC", "CoLA", "STS")
GLUE = {
    "BERT base": (84.0, 90.5, 71.2, 66.4, 93.5, 88.9, 52.1, 85.8, 79.6),
    "RoBERTa base": (87.6, 92.8, 91.9, 78.7, 94.8, 90.2, 63.6, 91.2, 86.4),
    "GTE-en-8192 base": (86.7, 91.9, 88.8, 84.8, 93.3, 92.1, 57.0, 90.2, 85.6),
    "NomicBERT-2048": (86.0, 92.0, 92.0, 82.0, 93.0, 88.0, 50.0, 90.0, 84.0),
    "ModernBERT base": (89.1, 93.9, 92.1, 87.4, 96.0, 92.2, 65.1, 91.8, 88.5),
    "NeoBERT-1024": (88.9, 93.9, 90.7, 91.0, 95.8, 93.4, 64.8, 92.1, 88.8),
    "NeoBERT-4096": (89.0, 93.7, 90.7, 91.3, 95.6, 93.4, 66.2, 91.8, 89.0),
    "BERT large": (86.3, 92.7, 72.1, 70.1, 94.9, 89.3, 60.5, 86.5, 82.1),
    "RoBERTa large": (90.2, 94.7, 92.2, 86.6, 96.4, 90.9, 68.0, 92.4, 88.9),
    "DeBERTaV3 large": (91.9, 96.0, 93.0, 92.7, 96.9, 91.9, 75.3, 93.0, 91.4),
    "GTE-en-8192 large": (89.2, 93.9, 89.2, 88.1, 95.1, 93.5, 60.4, 91.4, 87.6),
    "ModernBERT large": (90.8, 95.2, 92.7, 92.1, 97.1, 91.7, 71.4, 92.8, 90.5),
}
GLUE_NOTE = (
    "Rows marked 'published' are Table 3 of arXiv 2502.19587: one seed, the best of all "
    "evaluations on the dev set, baselines copied "
    "from other papers (BERT's from the test server)."
)
