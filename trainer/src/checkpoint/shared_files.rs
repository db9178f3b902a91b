//! Shares the files of a checkpoint between the processes of a machine, without copies.
//!
//! One process writes them into anonymous memory and seals it: from then on, no process can change
//! it. Other processes open it through the descriptor of the first one and map it. The memory is
//! freed when the last process drops it, however these processes end.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use memmap2::Mmap;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde::{Deserialize, Serialize};

use super::CheckpointContents;

/// Alignment of each file. burn reads tensors without copying them if a file is aligned to 16.
const ALIGNMENT: u64 = 64;
const TOKEN_BYTES: usize = 8;

/// Files in sealed memory. Other processes can open them until this value is dropped.
#[derive(Debug)]
pub(crate) struct SharedFiles {
    _memory: File,
    index: SharedIndex,
}

/// Tells other processes of the machine where the files are.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct SharedIndex {
    /// The memory, as a descriptor of the process that created it.
    path: PathBuf,
    /// First bytes of the memory. In another PID namespace, the path may name other memory.
    token: [u8; TOKEN_BYTES],
    /// Offset and length of each file.
    files: BTreeMap<String, (u64, u64)>,
}

impl SharedFiles {
    /// Copies files into sealed memory, and returns them there.
    ///
    /// # Errors
    ///
    /// Fails if the system refuses the memory.
    pub(crate) fn new(contents: &CheckpointContents) -> io::Result<(Self, CheckpointContents)> {
        let memory = create_memory()?;
        let token = RandomState::new().build_hasher().finish().to_le_bytes();
        memory.write_all_at(&token, 0)?;
        let (mut files, mut end) = (BTreeMap::new(), token.len() as u64);
        for (name, bytes) in contents {
            let start = end.next_multiple_of(ALIGNMENT);
            memory.write_all_at(bytes, start)?;
            end = start + bytes.len() as u64;
            files.insert(name.clone(), (start, bytes.len() as u64));
        }
        fcntl_add_seals(
            &memory,
            SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
        )?;
        let descriptor = memory.as_raw_fd();
        let path = format!("/proc/{}/fd/{descriptor}", std::process::id()).into();
        let index = SharedIndex { path, token, files };
        let mapped = index.open_at(Path::new(&format!("/proc/self/fd/{descriptor}")))?;
        Ok((Self { _memory: memory, index }, mapped))
    }

    pub(crate) fn index(&self) -> &SharedIndex {
        &self.index
    }
}

fn create_memory() -> io::Result<File> {
    let name = "stoker-checkpoint";
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know this flag; later ones may require it.
    let memory = memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL);
    Ok(memory.or_else(|_| memfd_create(name, flags))?.into())
}

impl SharedIndex {
    /// Maps the files. They stay mapped when the process that created them drops them.
    ///
    /// # Errors
    ///
    /// Fails if this process cannot access the memory of the other one, or if it is not sealed.
    pub(crate) fn open(&self) -> io::Result<CheckpointContents> {
        self.open_at(&self.path)
    }

    fn open_at(&self, path: &Path) -> io::Result<CheckpointContents> {
        // Kernels before 6.7 map sealed memory only if it is opened for reading.
        let memory = File::open(path)?;
        let mapped = Bytes::from_owner(Mmap::map_if_safe(&memory).map_err(io::Error::other)?);
        if !mapped.starts_with(&self.token) {
            let path = path.display();
            return Err(io::Error::other(format!("{path} is not the memory of the other rank")));
        }
        let slice = |(start, length): (u64, u64)| -> Option<Bytes> {
            let (start, length) = (usize::try_from(start).ok()?, usize::try_from(length).ok()?);
            let range = start..start.checked_add(length)?;
            mapped.get(range.clone())?;
            Some(mapped.slice(range))
        };
        let file = |(name, range): (&String, &(u64, u64))| {
            let bytes = slice(*range).ok_or_else(|| io::Error::other("the memory is too small"))?;
            Ok((name.clone(), bytes))
        };
        self.files.iter().map(file).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn contents() -> CheckpointContents {
        let files: [(&str, &[u8]); 3] = [("a", &[1; 100]), ("b/c", &[]), ("d", b"weights")];
        files.map(|(name, bytes)| (name.to_owned(), Bytes::from_static(bytes))).into()
    }

    #[test]
    fn shared_files_are_equal_aligned_and_outlive_their_creator() {
        let (shared, mine) = SharedFiles::new(&contents()).unwrap();
        let index = serde_json::to_string(shared.index()).unwrap();
        let index: SharedIndex = serde_json::from_str(&index).unwrap();
        let opened = index.open().unwrap();
        drop(shared);
        for files in [mine, opened] {
            assert_eq!(files, contents());
            for (name, bytes) in files {
                assert!(bytes.as_ptr().addr().is_multiple_of(16), "{name}");
            }
        }
    }

    #[test]
    fn shared_files_cannot_be_changed() {
        let (shared, _) = SharedFiles::new(&contents()).unwrap();
        let opened = || File::options().write(true).open(&shared.index().path).unwrap();
        assert!(opened().write_all(b"x").is_err());
        assert!(opened().set_len(1).is_err());
        assert!(opened().set_len(1 << 20).is_err());
    }

    #[test]
    fn other_memory_is_refused() {
        let (shared, _) = SharedFiles::new(&contents()).unwrap();
        let (other, _) = SharedFiles::new(&contents()).unwrap();
        let check = |index: SharedIndex, expected: &str| {
            let error = index.open().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let index = || shared.index().clone();
        check(SharedIndex { path: "/proc/self/fd/100000".into(), ..index() }, "No such file");
        let path = other.index().path.clone();
        check(SharedIndex { path, ..index() }, "is not the memory of the other rank");
        let files = BTreeMap::from([("a".to_owned(), (64, 1 << 20))]);
        check(SharedIndex { files, ..index() }, "the memory is too small");
        let unsealed = File::from(memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap());
        unsealed.write_all_at(&shared.index().token, 0).unwrap();
        unsealed.set_len(1000).unwrap();
        let path = format!("/proc/self/fd/{}", unsealed.as_raw_fd()).into();
        check(SharedIndex { path, ..index() }, "");
    }
}
