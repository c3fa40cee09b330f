"""Analysis of trained models: attention, effective context and evaluation speed, as values, plots and pages."""
