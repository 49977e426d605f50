"""Training of the demo models, evaluation of the demo model, distillation of draft models. In: text. Out: weights."""
