"""From a checkpoint, or at random: weights as blocks take them, and the models made of them."""
