"""Operations on tensors with several implementations: attention, linear layers, dropout, losses; and C++ for CPUs."""
