"""The folds over final entries: who takes part, lineage, decisions, evidence, trust, credit and snapshots."""
