//! Data by address, with a cache on the machine.
//!
//! | address | what happens |
//! |---|---|
//! | `path`, `file:///path` | used where it lies |
//! | `http://...`, `https://...` | downloaded once |
//! | `s3://bucket/object`, `gs://...`, `az://...` | downloaded once, with the environment's credentials |
//!
//! What was downloaded is found again by its address and the SHA-256 asked for, so content that
//! changes under the same address needs a sum. A file enters the cache whole or not at all, by a
//! rename, and one process downloads while others that want the same wait.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use stoker_api::names::ENV_CACHE;
use stoker_storage::hash::sha256_hex;
use url::Url;

use super::DataError;

mod download;

/// Bytes read at a time to make a sum.
const HASH_BYTES: usize = 1 << 20;

/// A file on this machine with what `address` names, in the cache of [`Cache::standard`] if it has
/// to be downloaded. `sha256` is checked each time, if given.
///
/// # Errors
///
/// As [`Cache::fetch`].
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

/// Where data is kept that was downloaded.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// In this folder, which is made when something is downloaded.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// In `$STOKER_CACHE/data`, or `$XDG_CACHE_HOME/stoker/data`, or `$HOME/.cache/stoker/data`: the
    /// first whose variable is set.
    ///
    /// # Errors
    ///
    /// None of the variables is set.
    pub fn standard() -> Result<Self, DataError> {
        let set = |name| std::env::var_os(name).filter(|it| !it.is_empty()).map(PathBuf::from);
        let cache = set(ENV_CACHE)
            .or_else(|| set("XDG_CACHE_HOME").map(|it| it.join("stoker")))
            .or_else(|| set("HOME").map(|it| it.join(".cache").join("stoker")));
        cache.map(|it| Self::new(it.join("data"))).ok_or_else(|| DataError::Address {
            address: "the cache".into(),
            reason: format!("none of {ENV_CACHE}, XDG_CACHE_HOME and HOME is set"),
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A file on this machine with what `address` names: see the [module](self).
    ///
    /// # Errors
    ///
    /// The address is none, its content cannot be had, or its SHA-256 is not `sha256`. Nothing of
    /// it is in the cache then.
    pub fn fetch(&self, address: &str, sha256: Option<&str>) -> Result<PathBuf, DataError> {
        let sha256 = sha256.map(parse_sum).transpose()?;
        let url = match parse(address)? {
            Place::Here(path) => {
                let shown = path.display().to_string();
                let checked = match &sha256 {
                    Some(expected) => Hash::of(&path).map(|it| it.check(&shown, expected)),
                    // A file of any size costs nothing.
                    None => fs::metadata(&path).map(|_| Ok(())),
                };
                return checked.map_err(|source| DataError::read(&shown, source))?.map(|()| path);
            }
            Place::There(url) => url,
        };
        let key = sha256_hex(format!("{url}\n{}", sha256.as_deref().unwrap_or("")).as_bytes());
        let folder = self.folder.join("fetched").join(key);
        fs::create_dir_all(&folder)
            .map_err(|source| DataError::write(folder.display().to_string(), source))?;
        let path = folder.join(file_name(&url));
        // Where the file system has no locks, two may download at once: the renames keep it right.
        let lock = File::create(folder.join(".lock")).ok();
        let held = lock.as_ref().map(File::lock);
        if matches!(held, Some(Ok(()))) {
            Part::sweep(&folder);
        }
        if path.exists() && is_as_kept(&path, sha256.as_deref()) {
            return Ok(path);
        }
        let part = Part::new(&folder);
        download::download(&url, &part.0)?;
        let hash = Hash::of(&part.0)
            .map_err(|source| DataError::read(part.0.display().to_string(), source))?;
        if let Some(expected) = &sha256 {
            hash.check(&shown(&url), expected)?;
        }
        fs::rename(&part.0, &path)
            .map_err(|source| DataError::write(path.display().to_string(), source))?;
        Ok(path)
    }
}

/// Whether a file in the cache may be used. What was damaged since is fetched again.
fn is_as_kept(path: &Path, sha256: Option<&str>) -> bool {
    sha256.is_none_or(|expected| Hash::of(path).is_ok_and(|hash| hash.sum == expected))
}

/// What an address means.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// A file of this machine.
    Here(PathBuf),
    /// Something to download.
    There(Url),
}

fn parse(address: &str) -> Result<Place, DataError> {
    let refused = |reason: String| DataError::Address { address: shown_text(address), reason };
    if address.is_empty() {
        return Err(refused("it is empty".into()));
    }
    if !address.contains("://") {
        return Ok(Place::Here(address.into()));
    }
    let url = Url::parse(address).map_err(|error| refused(error.to_string()))?;
    match url.scheme() {
        "file" => {
            let path = url.to_file_path();
            path.map(Place::Here).map_err(|()| refused("a file URL is file:///path".into()))
        }
        "http" | "https" => Ok(Place::There(url)),
        "s3" | "gs" | "az" if url.path().len() > 1 => Ok(Place::There(url)),
        "s3" | "gs" | "az" => Err(refused("it names a bucket and no object".into())),
        other => Err(refused(format!("the scheme {other} is unknown"))),
    }
}

/// An address for messages: without user, password and query, which may hold secrets.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    let has_query = url.query().is_some();
    url.set_query(has_query.then_some("..."));
    // Fails for URLs without a host, which have no user either.
    let _ = url.set_username("").and_then(|()| url.set_password(None));
    url.to_string()
}

fn shown_text(address: &str) -> String {
    Url::parse(address).map_or_else(|_| address.into(), |url| shown(&url))
}

/// The last name in a URL's path, so that people and readers see what it is.
fn file_name(url: &Url) -> String {
    let name = url.path().rsplit('/').next().unwrap_or_default();
    let plain = |it: char| it.is_ascii_alphanumeric() || matches!(it, '-' | '_' | '.');
    let name: String = name.chars().filter(|it| plain(*it)).take(100).collect();
    let name = name.trim_start_matches('.');
    if name.is_empty() { "content".into() } else { name.into() }
}

fn parse_sum(text: &str) -> Result<String, DataError> {
    let sum = text.trim().to_ascii_lowercase();
    if sum.len() == 64 && sum.bytes().all(|it| it.is_ascii_hexdigit()) {
        return Ok(sum);
    }
    Err(DataError::Mismatch {
        subject: "SHA-256".into(),
        expected: "64 hex digits".into(),
        found: format!("{text:?}"),
    })
}

/// What a file holds, by its sum.
struct Hash {
    sum: String,
    bytes: u64,
}

impl Hash {
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
        let sum = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { sum, bytes })
    }

    fn check(self, address: &str, expected: &str) -> Result<(), DataError> {
        if self.sum == expected {
            return Ok(());
        }
        Err(DataError::Hash {
            address: address.into(),
            expected: expected.into(),
            found: self.sum,
            bytes: self.bytes,
        })
    }
}

/// A file while it is written; gone with this value unless renamed before.
struct Part(PathBuf);

impl Part {
    /// A name that no other thread, process or machine with the same folder uses.
    fn new(folder: &Path) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        Self(folder.join(format!(".{now}-{}-{count}.part", std::process::id())))
    }
}

impl Part {
    /// Removes what killed processes have left, where nobody else downloads.
    fn sweep(folder: &Path) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|it| it == "part") && is_hidden(&entry) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

fn is_hidden(entry: &fs::DirEntry) -> bool {
    entry.file_name().as_encoded_bytes().starts_with(b".")
}

impl Drop for Part {
    fn drop(&mut self) {
        // Renamed or never made, mostly.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests;
