//! The manifest of a checkpoint.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Report;

/// [`Manifest::format`] of a checkpoint whose files are all hashed with SHA-256.
pub const MANIFEST_FORMAT: u32 = 1;

/// [`Manifest::format`] of a checkpoint with a file that is hashed in chunks with SHA-256. Only
/// older versions write it.
pub const MANIFEST_FORMAT_CHUNKS: u32 = 2;

/// [`Manifest::format`] of a checkpoint with a file that is hashed with BLAKE3. The newest format.
pub const MANIFEST_FORMAT_BLAKE3: u32 = 3;

/// The manifest of a checkpoint. It is written last: without it, the checkpoint does not exist.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Format version of the checkpoint: [`MANIFEST_FORMAT`], [`MANIFEST_FORMAT_CHUNKS`] or
    /// [`MANIFEST_FORMAT_BLAKE3`].
    pub format: u32,
    /// Unique ID of the experiment.
    pub experiment_id: String,
    /// Index of the trial.
    pub trial: u32,
    /// Number of the attempt that wrote the checkpoint.
    pub attempt: u32,
    /// SHA-256 of the trial's seed and hyperparameters, in hex. Unset in checkpoints of earlier
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_sha256: Option<String>,
    /// Number of global batches trained.
    pub batches: u64,
    /// Searched metric of a validation at the same batch, as a decimal string.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
    /// Metrics of that validation, as reported to the runner. Empty in checkpoints of `fit`, whose
    /// `state.json` has them, and of earlier versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub validation: BTreeMap<String, String>,
    /// Files of the checkpoint, by name.
    pub files: BTreeMap<String, FileEntry>,
    /// Unanswered reports, which are sent after a restore.
    #[serde(default)]
    pub unsent: Vec<Report>,
    /// Metadata that the user's program added.
    #[serde(default)]
    pub metadata: BTreeMap<String, Value>,
}

/// Why a manifest cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The text is not the JSON of a manifest.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A newer version wrote the checkpoint.
    #[error(
        "it has format {0}, but this version reads formats {MANIFEST_FORMAT} to \
         {MANIFEST_FORMAT_BLAKE3}; use the version that wrote it"
    )]
    Format(u32),
}

impl Manifest {
    /// Reads a manifest. Checks the format first, because another one may have other fields.
    ///
    /// # Errors
    ///
    /// See [`ManifestError`].
    pub fn parse(json: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Header {
            format: u32,
        }
        let Header { format } = serde_json::from_slice(json)?;
        match format {
            MANIFEST_FORMAT..=MANIFEST_FORMAT_BLAKE3 => Ok(serde_json::from_slice(json)?),
            _ => Err(ManifestError::Format(format)),
        }
    }
}

/// One file of a checkpoint.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct FileEntry {
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Hash of the file.
    #[serde(flatten)]
    pub hash: FileHash,
}

/// Hash of a file, in lowercase hex.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum FileHash {
    /// BLAKE3, as `b3sum` prints it.
    Blake3 {
        /// The hash.
        blake3: String,
    },
    /// SHA-256.
    #[serde(rename_all = "camelCase")]
    Sha256 {
        /// The hash. With `chunkBytes`, SHA-256 of the concatenated SHA-256 of the chunks.
        sha256: String,
        /// Size of a chunk in bytes, if the file is hashed in chunks. The last chunk may be
        /// shorter.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chunk_bytes: Option<u64>,
    },
}

/// How a file is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashAlgorithm {
    /// BLAKE3.
    Blake3,
    /// SHA-256 of the complete file.
    Sha256,
    /// SHA-256 of the concatenated SHA-256 of chunks of this size in bytes.
    Sha256Chunks(u64),
}

impl FileHash {
    /// Returns how the file is hashed.
    pub fn algorithm(&self) -> HashAlgorithm {
        match self {
            Self::Blake3 { .. } => HashAlgorithm::Blake3,
            Self::Sha256 { chunk_bytes: None, .. } => HashAlgorithm::Sha256,
            Self::Sha256 { chunk_bytes: Some(bytes), .. } => HashAlgorithm::Sha256Chunks(*bytes),
        }
    }

    /// Returns the hash in hex.
    pub fn hex(&self) -> &str {
        match self {
            Self::Blake3 { blake3 } => blake3,
            Self::Sha256 { sha256, .. } => sha256,
        }
    }
}

impl HashAlgorithm {
    /// Returns a hash of this algorithm.
    pub fn hash(self, hex: String) -> FileHash {
        match self {
            Self::Blake3 => FileHash::Blake3 { blake3: hex },
            Self::Sha256 => FileHash::Sha256 { sha256: hex, chunk_bytes: None },
            Self::Sha256Chunks(bytes) => FileHash::Sha256 { sha256: hex, chunk_bytes: Some(bytes) },
        }
    }

    /// Returns the first format of manifests with such a hash.
    pub fn format(self) -> u32 {
        match self {
            Self::Sha256 => MANIFEST_FORMAT,
            Self::Sha256Chunks(_) => MANIFEST_FORMAT_CHUNKS,
            Self::Blake3 => MANIFEST_FORMAT_BLAKE3,
        }
    }
}

impl fmt::Display for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.algorithm() == HashAlgorithm::Blake3 { "BLAKE3" } else { "SHA-256" };
        write!(f, "{name} {}", self.hex())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn entries_of_all_formats_round_trip() {
        let check = |entry: Value, algorithm: HashAlgorithm, format: u32| {
            let read: FileEntry = serde_json::from_value(entry.clone()).unwrap();
            assert_eq!((read.hash.algorithm(), algorithm.format()), (algorithm, format));
            assert_eq!((read.hash.hex(), read.bytes), ("ab", 3));
            assert_eq!(algorithm.hash("ab".to_owned()), read.hash);
            assert_eq!(serde_json::to_value(read).unwrap(), entry);
        };
        check(json!({"bytes": 3, "sha256": "ab"}), HashAlgorithm::Sha256, 1);
        let chunks = json!({"bytes": 3, "sha256": "ab", "chunkBytes": 8});
        check(chunks, HashAlgorithm::Sha256Chunks(8), 2);
        check(json!({"bytes": 3, "blake3": "ab"}), HashAlgorithm::Blake3, 3);
        serde_json::from_value::<FileEntry>(json!({"bytes": 3})).unwrap_err();
    }

    #[test]
    fn newer_formats_are_refused_whatever_they_contain() {
        let error = |text: &str| Manifest::parse(text.as_bytes()).unwrap_err().to_string();
        let expected = "it has format 4, but this version reads formats 1 to 3; use the version \
                        that wrote it";
        assert_eq!(error(r#"{"format": 4, "files": ["x"]}"#), expected);
        assert!(error(r#"{"format": 0}"#).starts_with("it has format 0,"));
        assert!(error(r#"{"format": 3}"#).contains("missing field"));
        assert!(error("{").contains("EOF"));
    }
}
