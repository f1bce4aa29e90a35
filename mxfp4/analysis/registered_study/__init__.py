"""The registered study (book/study.yml): its gates, its tables from records, its contrasts and their verdicts."""
