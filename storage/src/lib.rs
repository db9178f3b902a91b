//! Object storage: one root, whatever is behind it, and where things lie below it.
//!
//! ```text
//!  file:///path  s3://bucket/prefix  gs://bucket/prefix  az://container/prefix  memory://
//!        \             |                   |                    |               /
//!         '------------+---- [Storage]: put, get, list, delete, exists --------'
//!                      |
//!        [layout]: NAMESPACE/EXPERIMENT-UID8/trials/INDEX/...
//! ```
//!
//! Every operation is tried again, with back-off, while its failure may pass. Nothing relies on
//! conditional writes, which some S3 servers ignore: two writers never share a path.
//!
//! # Reading order
//!
//! 1. [`Storage`]: the operations. 2. [`StorageError`]: what can be done about a failure.
//! 3. [`layout`]: paths. 4. [`segments`]: lines appended to numbered objects.
//! 5. [`metrics`]: rows of metrics, and which of them count. 6. [`hash`]: SHA-256 in hex.

mod error;
pub mod hash;
pub mod layout;
pub mod metrics;
mod open;
mod profile;
pub mod segments;
mod store;

pub use crate::error::StorageError;
pub use crate::store::Storage;
