//! Object storage: one API for all backends, and the layout of objects below a root.
//!
//! ```text
//!  file:///path  s3://bucket/prefix  gs://bucket/prefix  az://container/prefix  memory://
//!        \             |                   |                    |               /
//!         '------------+---- [Storage]: put, get, list, delete, exists --------'
//!                      |
//!        [layout]: NAMESPACE/EXPERIMENT-UID8/trials/INDEX/...
//! ```
//!
//! Every operation is retried with back-off as long as its failure may be transient. Correctness
//! does not depend on conditional writes, which some S3 servers ignore: two writers never share a
//! path.
//!
//! # Reading order
//!
//! 1. [`Storage`]: the operations.
//! 2. [`StorageError`]: failures, by remedy.
//! 3. [`layout`][]: paths.
//! 4. [`segments`]: lines appended to numbered objects.
//! 5. [`lines`]: lines of a program's output, for its log.
//! 6. [`metrics`]: rows of metrics, and which rows are in effect.
//! 7. [`hash`]: hashes of files, SHA-256 or BLAKE3.
//! 8. [`input`]: input files of a batch inference job.

mod buffer;
mod credentials;
mod error;
pub mod hash;
pub mod input;
pub mod layout;
pub mod lines;
pub mod metrics;
mod open;
mod profile;
pub mod segments;
mod store;

pub use crate::credentials::Credentials;
pub use crate::error::StorageError;
pub use crate::store::{ObjectState, Storage, UploadError};
