//! A search method of any kind.

use super::{
    AsyncHalving, External, FixedLength, Median, Pbt, SearchMethod, SyncHalving, Tournament,
};

/// A search method of any kind.
#[derive(Clone, Debug, PartialEq)]
pub enum AnyMethod {
    /// Single, random and grid search.
    FixedLength(FixedLength),
    /// One bracket of ASHA.
    AsyncHalving(AsyncHalving),
    /// Adaptive ASHA.
    Tournament(Tournament),
    /// Synchronous halving, adaptive search and Hyperband.
    SyncHalving(SyncHalving),
    /// Population based training.
    Pbt(Pbt),
    /// A service of the user decides.
    External(External),
    /// Another method with median stopping.
    Median(Median),
}

impl AnyMethod {
    pub(in crate::search) fn as_dyn(&self) -> &dyn SearchMethod {
        match self {
            Self::FixedLength(method) => method,
            Self::AsyncHalving(method) => method,
            Self::Tournament(method) => method,
            Self::SyncHalving(method) => method,
            Self::Pbt(method) => method,
            Self::External(method) => method,
            Self::Median(method) => method,
        }
    }

    pub(in crate::search) fn as_dyn_mut(&mut self) -> &mut dyn SearchMethod {
        match self {
            Self::FixedLength(method) => method,
            Self::AsyncHalving(method) => method,
            Self::Tournament(method) => method,
            Self::SyncHalving(method) => method,
            Self::Pbt(method) => method,
            Self::External(method) => method,
            Self::Median(method) => method,
        }
    }
}
