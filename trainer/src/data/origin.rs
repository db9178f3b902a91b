//! Kinds of sources that batches come from.

use std::sync::Arc;

#[cfg(feature = "learner")]
use super::SequentialSource;
use super::Source;
use super::stream::BatchStream;

/// Source of the batches.
pub(super) enum Origin<B> {
    Indexed(Arc<dyn Source<B>>),
    Streamed(Arc<dyn BatchStream<B>>),
    #[cfg(feature = "learner")]
    Sequential(Arc<dyn SequentialSource<B>>),
}

impl<B> Clone for Origin<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Indexed(source) => Self::Indexed(source.clone()),
            Self::Streamed(stream) => Self::Streamed(stream.clone()),
            #[cfg(feature = "learner")]
            Self::Sequential(source) => Self::Sequential(source.clone()),
        }
    }
}

impl<B> Origin<B> {
    pub(super) fn samples(&self) -> usize {
        match self {
            Self::Indexed(source) => source.samples(),
            Self::Streamed(stream) => stream.samples(),
            #[cfg(feature = "learner")]
            Self::Sequential(source) => source.samples(),
        }
    }

    pub(super) fn is_batched(&self) -> bool {
        matches!(self, Self::Indexed(source) if source.is_batched())
    }

    /// Returns whether the batches come from a loader, which determines their sizes.
    pub(super) fn is_sequential(&self) -> bool {
        #[cfg(feature = "learner")]
        if matches!(self, Self::Sequential(_)) {
            return true;
        }
        false
    }

    pub(super) fn fields(&self) -> Vec<String> {
        match self {
            Self::Indexed(source) => source.fields(),
            _ => vec![],
        }
    }
}
