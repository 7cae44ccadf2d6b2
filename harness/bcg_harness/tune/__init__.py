"""Which bucket ladder serves a distribution of batches best, from what single buckets were measured to cost."""
