//! Every decision, pure.
