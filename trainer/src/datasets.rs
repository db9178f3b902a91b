//! Data files: where they come from, how they are read, and how images become batches.
//!
//! ```text
//! address --fetch--> path --idx | cifar | csv--> values in memory --Images | Data::arrays--> batches
//! ```
//!
//! Every reader takes plain files and gzip, told apart by their first bytes, checks what a file says
//! about itself against what it holds, and names the file, what was expected, what was found and the
//! remedy.

mod error;

pub mod cifar;
pub mod csv;
pub mod fetch;
pub mod idx;
mod images;
mod read;

pub use error::DataError;
pub use fetch::{Cache, fetch};
pub use images::{Augment, Images};
