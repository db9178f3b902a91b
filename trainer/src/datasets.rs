//! Data sets: download, file formats and image batches.
//!
//! ```text
//! address --fetch--> path --idx | cifar | csv--> values --Images | Data::arrays--> batches
//! ```
//!
//! All readers accept plain and gzip-compressed files, which they distinguish by the first bytes.
//! They check the header of a file against its contents. Errors name the file, the expected and the
//! actual value, and a remedy.

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
