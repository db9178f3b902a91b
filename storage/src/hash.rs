//! SHA-256 in hex, the format of manifests.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

/// Returns the SHA-256 of `bytes` as 64 lowercase hex digits.
///
/// # Examples
///
/// ```
/// let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
/// assert_eq!(stoker_storage::hash::sha256_hex(b""), empty);
/// ```
pub fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
