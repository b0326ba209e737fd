"""From a recipe and a loaded model to the eraser that training uses, or to an edited model.

`build` chooses one file for the kind of target: `denoiser`, `text_encoder`, `classifier` (also CLIP
models) or `vae`. Denoisers and text encoders are trained on prompts, in these steps:

    context     the recipe and the model, resolved once
    plan        the prompts and images of each objective; the model computes nothing yet
    encode      prompts to embeddings or tokens
    latents     images to latents
    objectives  all of it to the objectives of the eraser

Classifiers and VAEs are trained on examples that `labelled_data` selects. `classifier_edit` and
`cross_attention_edit` change a model in closed form, without training.
"""
