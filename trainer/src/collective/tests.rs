//! What every implementation must do; gangs of threads, and strangers.

mod conformance;
mod meeting;
mod silence;
