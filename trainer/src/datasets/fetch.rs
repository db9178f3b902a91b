//! Downloads data by address, with a local cache.
//!
//! | address | what happens |
//! |---|---|
//! | `path`, `file:///path` | used in place |
//! | `http://...`, `https://...` | downloaded once |
//! | `s3://...`, `gs://...`, `az://...` | downloaded once, with credentials from the environment |
//!
//! The cache is keyed by the address and the requested SHA-256. Specify the hash if the content at
//! an address may change. Files enter the cache by an atomic rename. Of several processes that
//! request the same file, one downloads while the others wait.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use stoker_api::names::ENV_CACHE;
use stoker_storage::hash::{hex, sha256_hex};
use url::Url;

use super::DataError;

mod download;

/// Buffer size for hashing, in bytes.
const HASH_BYTES: usize = 1 << 20;

/// Returns the path of a local file with the content of `address`, downloading it to
/// [`Cache::standard`] if necessary. If `sha256` is given, it is verified on every call.
///
/// # Errors
///
/// Same as [`Cache::fetch`].
///
/// # Examples
///
/// ```no_run
/// let path = stoker_trainer::datasets::fetch("https://example.org/images.gz", None)?;
/// # Ok::<(), stoker_trainer::datasets::DataError>(())
/// ```
pub fn fetch(address: &str, sha256: Option<&str>) -> Result<PathBuf, DataError> {
    Cache::standard()?.fetch(address, sha256)
}

/// Cache of downloaded files.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Creates a cache in this directory, which is created on the first download.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Creates a cache in `$STOKER_CACHE/data`, `$XDG_CACHE_HOME/stoker/data` or
    /// `$HOME/.cache/stoker/data`: the first whose variable is set and not empty.
    ///
    /// # Errors
    ///
    /// Fails if none of the variables is set.
    pub fn standard() -> Result<Self, DataError> {
        let set =
            |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = set(ENV_CACHE)
            .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("stoker")))
            .or_else(|| set("HOME").map(|folder| folder.join(".cache").join("stoker")));
        cache.map(|folder| Self::new(folder.join("data"))).ok_or_else(|| DataError::Address {
            address: "the cache".into(),
            reason: format!("none of {ENV_CACHE}, XDG_CACHE_HOME and HOME is set"),
        })
    }

    /// Returns the directory of the cache.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of a local file with the content of `address`; see the [module](self).
    ///
    /// # Errors
    ///
    /// Fails if the address is invalid, its content is unavailable, or its SHA-256 is not `sha256`.
    /// A failed download leaves nothing in the cache.
    pub fn fetch(&self, address: &str, sha256: Option<&str>) -> Result<PathBuf, DataError> {
        let sha256 = sha256.map(parse_sha256).transpose()?;
        let url = match parse(address)? {
            Location::Local(path) => {
                let shown = path.display().to_string();
                let checked = match &sha256 {
                    Some(expected) => FileHash::of(&path).map(|hash| hash.check(&shown, expected)),
                    // Check only that the file exists; reading a large file would be slow.
                    None => fs::metadata(&path).map(|_| Ok(())),
                };
                return checked.map_err(|source| DataError::read(&shown, source))?.map(|()| path);
            }
            Location::Remote(url) => url,
        };
        let key = sha256_hex(format!("{url}\n{}", sha256.as_deref().unwrap_or("")).as_bytes());
        let folder = self.folder.join("fetched").join(key);
        fs::create_dir_all(&folder)
            .map_err(|source| DataError::write(folder.display().to_string(), source))?;
        let path = folder.join(file_name(&url));
        // Without file locks, several processes may download at once; the rename keeps that safe.
        let lock = File::create(folder.join(".lock")).ok();
        let locked = lock.as_ref().map(File::lock);
        if matches!(locked, Some(Ok(()))) {
            PartialFile::delete_abandoned(&folder);
        }
        if path.exists() && is_intact(&path, sha256.as_deref()) {
            return Ok(path);
        }
        let partial = PartialFile::new(&folder);
        download::download(&url, &partial.0)?;
        let hash = FileHash::of(&partial.0)
            .map_err(|source| DataError::read(partial.0.display().to_string(), source))?;
        if let Some(expected) = &sha256 {
            hash.check(&redact(&url), expected)?;
        }
        fs::rename(&partial.0, &path)
            .map_err(|source| DataError::write(path.display().to_string(), source))?;
        Ok(path)
    }
}

/// Returns `true` if a cached file is intact. A damaged file is downloaded again.
fn is_intact(path: &Path, sha256: Option<&str>) -> bool {
    sha256.is_none_or(|expected| FileHash::of(path).is_ok_and(|hash| hash.sha256 == expected))
}

/// Parsed address.
#[derive(Debug, PartialEq, Eq)]
enum Location {
    /// Local path.
    Local(PathBuf),
    /// URL to download.
    Remote(Url),
}

fn parse(address: &str) -> Result<Location, DataError> {
    let refused = |reason: String| DataError::Address { address: redact_text(address), reason };
    if address.is_empty() {
        return Err(refused("the address is empty".into()));
    }
    if !address.contains("://") {
        return Ok(Location::Local(address.into()));
    }
    let url = Url::parse(address).map_err(|error| refused(error.to_string()))?;
    match url.scheme() {
        "file" => {
            let path = url.to_file_path();
            path.map(Location::Local)
                .map_err(|()| refused("a file URL must have the form file:///path".into()))
        }
        "http" | "https" => Ok(Location::Remote(url)),
        "s3" | "gs" | "az" if url.path().len() > 1 => Ok(Location::Remote(url)),
        "s3" | "gs" | "az" => Err(refused("the URL contains a bucket but no object".into())),
        other => Err(refused(format!("unknown scheme {other}"))),
    }
}

/// Formats a URL for messages, without user, password and query, which may contain secrets.
fn redact(url: &Url) -> String {
    let mut url = url.clone();
    let has_query = url.query().is_some();
    url.set_query(has_query.then_some("..."));
    // Ignore the error: it occurs only for URLs without a host, which cannot have a user.
    let _ = url.set_username("").and_then(|()| url.set_password(None));
    url.to_string()
}

fn redact_text(address: &str) -> String {
    Url::parse(address).map_or_else(|_| address.into(), |url| redact(&url))
}

/// Returns the last component of a URL's path, so that the cached file has a recognizable name.
fn file_name(url: &Url) -> String {
    let name = url.path().rsplit('/').next().unwrap_or_default();
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = name.chars().filter(|c| plain(*c)).take(100).collect();
    let name = name.trim_start_matches('.');
    if name.is_empty() { "content".into() } else { name.into() }
}

fn parse_sha256(text: &str) -> Result<String, DataError> {
    let sum = text.trim().to_ascii_lowercase();
    if sum.len() == 64 && sum.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(sum);
    }
    Err(DataError::Mismatch {
        subject: "SHA-256".into(),
        expected: "64 hex digits".into(),
        found: format!("{text:?}"),
    })
}

/// Hash and size of a file.
struct FileHash {
    sha256: String,
    bytes: u64,
}

impl FileHash {
    fn of(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let (mut hasher, mut buffer, mut bytes) = (Sha256::new(), vec![0; HASH_BYTES], 0);
        loop {
            let len = file.read(&mut buffer)?;
            if len == 0 {
                break;
            }
            hasher.update(&buffer[..len]);
            bytes += len as u64;
        }
        Ok(Self { sha256: hex(&hasher.finalize()), bytes })
    }

    fn check(self, address: &str, expected: &str) -> Result<(), DataError> {
        if self.sha256 == expected {
            return Ok(());
        }
        Err(DataError::Hash {
            address: address.into(),
            expected: expected.into(),
            found: self.sha256,
            bytes: self.bytes,
        })
    }
}

/// Temporary file for a download; deleted on drop unless renamed before.
struct PartialFile(PathBuf);

impl PartialFile {
    /// Chooses a name that is unique across threads, processes and machines that share the
    /// directory.
    fn new(folder: &Path) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        Self(folder.join(format!(".{now}-{}-{count}.part", std::process::id())))
    }
}

impl PartialFile {
    /// Deletes temporary files of killed processes. The caller must hold the lock.
    fn delete_abandoned(folder: &Path) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "part")
                && is_hidden(&entry)
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

fn is_hidden(entry: &fs::DirEntry) -> bool {
    entry.file_name().as_encoded_bytes().starts_with(b".")
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // Ignore the error: usually the file was renamed or never created.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests;
