"""Image-text models with one tower per modality, trained by contrastive losses."""
