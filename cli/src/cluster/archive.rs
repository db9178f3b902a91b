//! Packs a program's files into one archive. The same files give identical bytes on any machine.
//!
//! ```text
//!  directory -- walk, .stokerignore --> sorted entries -- tar, gzip --> bytes -- SHA-256 --> name
//! ```

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use flate2::{Compression, GzBuilder};
use stoker_storage::hash::sha256_hex;

use crate::failure::Failure;

/// Maximum size of the compressed archive: every pod of every attempt downloads it.
pub(crate) const BYTES_MAX: u64 = 95_000_000;

/// File with patterns in gitignore syntax that exclude files.
const IGNORE_FILE: &str = ".stokerignore";
/// Always excluded: version history and files of `stoker run`.
const NEVER_SENT: [&str; 2] = [".git", ".stoker"];
/// Number of largest files listed in the error about a too large archive.
const LARGEST_NAMED: usize = 5;

/// Packed files.
#[derive(Debug)]
pub(crate) struct Archive {
    /// Gzip-compressed tar.
    pub(crate) bytes: Vec<u8>,
    /// SHA-256 of `bytes`, in hex.
    pub(crate) sha256: String,
    /// Number of files, without directories.
    pub(crate) num_files: usize,
    /// Total uncompressed size of the files.
    pub(crate) bytes_unpacked: u64,
}

/// One file or directory.
#[derive(Debug)]
struct Entry {
    /// Path in the file system.
    path: PathBuf,
    /// Path in the archive.
    name: PathBuf,
    is_folder: bool,
    is_program: bool,
    bytes: u64,
}

/// Packs the files of a directory, or a single program.
pub(crate) fn pack(path: &Path, bytes_max: u64) -> Result<Archive, Failure> {
    let metadata = std::fs::metadata(path).map_err(|error| failure("read", path, error))?;
    let entries = if metadata.is_dir() { walk(path)? } else { vec![program(path, &metadata)?] };
    let files = || entries.iter().filter(|entry| !entry.is_folder);
    if files().next().is_none() {
        return Err(failure("upload", path, "it contains no files"));
    }
    let limited = Limited { bytes: Vec::new(), bytes_max };
    // Omit file name and time from the gzip header: they would change the bytes.
    let gzip = GzBuilder::new().mtime(0).write(limited, Compression::default());
    let mut tar = tar::Builder::new(gzip);
    let packed = entries.iter().try_for_each(|entry| append(&mut tar, entry));
    let packed = packed.and_then(|()| tar.into_inner()?.finish());
    let bytes = match packed {
        Ok(limited) => limited.bytes,
        Err(error) if error.kind() == std::io::ErrorKind::FileTooLarge => {
            return Err(too_large(path, &entries, bytes_max));
        }
        Err(error) => return Err(failure("pack", path, error)),
    };
    Ok(Archive {
        sha256: sha256_hex(&bytes),
        num_files: files().count(),
        bytes_unpacked: files().map(|entry| entry.bytes).sum(),
        bytes,
    })
}

fn failure(what: &str, path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::Input(format!("cannot {what} {}: {why}", path.display()))
}

fn program(path: &Path, metadata: &std::fs::Metadata) -> Result<Entry, Failure> {
    let name = path.file_name().filter(|_| metadata.is_file());
    let name =
        name.ok_or_else(|| failure("upload", path, "it is neither a file nor a directory"))?;
    Ok(Entry {
        path: path.to_owned(),
        name: PathBuf::from(name),
        is_folder: false,
        is_program: true,
        bytes: metadata.len(),
    })
}

/// Returns the sorted entries of a directory, without excluded ones. Links are followed and
/// replaced by their targets.
fn walk(folder: &Path) -> Result<Vec<Entry>, Failure> {
    let walk = ignore::WalkBuilder::new(folder)
        .standard_filters(false)
        .add_custom_ignore_filename(IGNORE_FILE)
        .follow_links(true)
        .filter_entry(|item| {
            item.depth() == 0 || NEVER_SENT.iter().all(|name| item.file_name() != *name)
        })
        .build();
    let mut entries = Vec::new();
    for item in walk {
        let item = item.map_err(|error| {
            failure("pack", folder, format!("{error}; fix it or list it in {IGNORE_FILE}"))
        })?;
        if let Some(error) = item.error() {
            return Err(failure("pack", item.path(), format!("invalid ignore pattern: {error}")));
        }
        if item.depth() > 0 {
            entries.push(entry(folder, &item)?);
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn entry(folder: &Path, item: &ignore::DirEntry) -> Result<Entry, Failure> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = item.path();
    let refuse = |why: String| failure("upload", path, why);
    let metadata = std::fs::metadata(path).map_err(|error| refuse(error.to_string()))?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(refuse(format!(
            "it is neither a file nor a directory; list it in {IGNORE_FILE}"
        )));
    }
    let name = path.strip_prefix(folder).map_err(|error| refuse(error.to_string()))?;
    Ok(Entry {
        path: path.to_owned(),
        name: name.to_owned(),
        is_folder: metadata.is_dir(),
        is_program: metadata.permissions().mode() & 0o111 != 0,
        bytes: if metadata.is_file() { metadata.len() } else { 0 },
    })
}

fn append<W: Write>(tar: &mut tar::Builder<W>, entry: &Entry) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(match entry.is_folder {
        true => tar::EntryType::Directory,
        false => tar::EntryType::Regular,
    });
    // Use fixed owner and time, so that the archive depends only on names, modes and contents.
    header.set_mode(if entry.is_folder || entry.is_program { 0o755 } else { 0o644 });
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(entry.bytes);
    if entry.is_folder {
        return tar.append_data(&mut header, &entry.name, std::io::empty());
    }
    let named = |error: std::io::Error| {
        std::io::Error::new(error.kind(), format!("{}: {error}", entry.path.display()))
    };
    let mut file = std::fs::File::open(&entry.path).map_err(named)?.take(entry.bytes);
    tar.append_data(&mut header, &entry.name, &mut file)?;
    if file.limit() > 0 {
        return Err(named(std::io::Error::other("the file was truncated while it was read")));
    }
    Ok(())
}

fn too_large(path: &Path, entries: &[Entry], bytes_max: u64) -> Failure {
    let mut files: Vec<&Entry> = entries.iter().filter(|entry| !entry.is_folder).collect();
    files.sort_by_key(|file| std::cmp::Reverse(file.bytes));
    let largest: Vec<String> = files
        .iter()
        .take(LARGEST_NAMED)
        .map(|file| format!("{} ({})", file.name.display(), super::text::bytes(file.bytes)))
        .collect();
    let why = format!(
        "the packed files exceed {}; largest files: {}; list unneeded files in {IGNORE_FILE}, and \
         read data from a volume or the storage",
        super::text::bytes(bytes_max),
        largest.join(", ")
    );
    failure("upload", path, why)
}

/// Buffer with a maximum size.
#[derive(Debug)]
struct Limited {
    bytes: Vec<u8>,
    bytes_max: u64,
}

impl Write for Limited {
    fn write(&mut self, more: &[u8]) -> std::io::Result<usize> {
        if (self.bytes.len() + more.len()) as u64 > self.bytes_max {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.write(more)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        folder
    }

    /// Returns names, modes and contents of an archive, in order.
    fn contents(archive: &Archive) -> Vec<(String, u32, String)> {
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(archive.bytes.as_slice()));
        let read = |entry: std::io::Result<tar::Entry<'_, _>>| {
            let mut entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.mtime().unwrap()), (0, 0));
            let mode = header.mode().unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            (name, mode, text)
        };
        tar.entries().unwrap().map(read).collect()
    }

    fn check(files: &[&str], ignore: &str, expected: &[&str]) {
        let texts: Vec<(&str, &str)> = files.iter().map(|name| (*name, "text")).collect();
        let folder = folder(&texts);
        std::fs::write(folder.path().join(IGNORE_FILE), ignore).unwrap();
        let archive = pack(folder.path(), BYTES_MAX).unwrap();
        let names: Vec<String> = contents(&archive)
            .into_iter()
            .map(|(name, ..)| name)
            .filter(|name| name != IGNORE_FILE)
            .collect();
        assert_eq!(names, expected, "{ignore:?}");
    }

    #[test]
    fn ignore_patterns_follow_gitignore_rules() {
        check(&["a", "b/c", ".hidden"], "", &[".hidden", "a", "b", "b/c"]);
        check(&["a.log", "b/a.log", "b/a.rs"], "*.log\n", &["b", "b/a.rs"]);
        check(&["a.log", "b/a.log"], "/*.log", &["b", "b/a.log"]);
        check(&["keep.log", "a.log"], "*.log\n!keep.log", &["keep.log"]);
        check(&["data/x", "src/data/y", "a"], "/data/\n", &["a", "src", "src/data", "src/data/y"]);
        check(&["data/x", "src/data/y", "a"], "data/", &["a", "src"]);
        check(&["a", "t/x/y/z"], "t/**/z\n# a\n", &["a", "t", "t/x", "t/x/y"]);
        check(&[".git/config", "a", "b/.git/x", ".stoker/y"], "!.git", &["a", "b"]);
    }

    #[test]
    fn nested_stokerignore_counts_and_gitignore_does_not() {
        let folder = folder(&[
            (".gitignore", "model.bin"),
            ("model.bin", "needed"),
            ("sub/.stokerignore", "x"),
            ("sub/x", "not"),
            ("x", "here"),
        ]);
        let archive = pack(folder.path(), BYTES_MAX).unwrap();
        let names: Vec<String> = contents(&archive).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, [".gitignore", "model.bin", "sub", "sub/.stokerignore", "x"]);
    }

    #[test]
    fn same_files_give_identical_bytes() {
        let files = [("b/c", "1"), ("a", "2"), ("B", "3")];
        let first = folder(&files);
        let reversed: Vec<(&str, &str)> = files.into_iter().rev().collect();
        let second = folder(&reversed);
        let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let file = std::fs::File::options().write(true).open(second.path().join("a")).unwrap();
        file.set_modified(old).unwrap();
        let of = |folder: &tempfile::TempDir| pack(folder.path(), BYTES_MAX).unwrap();
        assert_eq!(of(&first).bytes, of(&second).bytes);
        // The gzip header contains neither time nor operating system.
        assert_eq!(of(&first).bytes[..10], [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255]);
        std::fs::write(second.path().join("a"), "4").unwrap();
        assert_ne!(of(&first).sha256, of(&second).sha256);
    }

    #[test]
    fn modes_are_kept_and_links_are_followed() {
        let folder = folder(&[("run", "#!"), ("text", "x")]);
        let run = folder.path().join("run");
        std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink("run", folder.path().join("link")).unwrap();
        let archive = pack(folder.path(), BYTES_MAX).unwrap();
        let entries: BTreeMap<String, (u32, String)> =
            contents(&archive).into_iter().map(|(name, mode, text)| (name, (mode, text))).collect();
        assert_eq!(entries["run"], (0o755, "#!".to_owned()));
        assert_eq!(entries["link"], (0o755, "#!".to_owned()));
        assert_eq!(entries["text"], (0o644, "x".to_owned()));
        assert_eq!((archive.num_files, archive.bytes_unpacked), (3, 5));
    }

    #[test]
    fn single_program_is_packed_as_executable() {
        let folder = folder(&[("train.sh", "#!/bin/sh")]);
        let archive = pack(&folder.path().join("train.sh"), BYTES_MAX).unwrap();
        assert_eq!(contents(&archive), [("train.sh".to_owned(), 0o755, "#!/bin/sh".to_owned())]);
    }

    #[test]
    fn long_names_are_kept() {
        let name = format!("{}/{}", "d".repeat(120), "f".repeat(140));
        let folder = folder(&[(&name, "x")]);
        let archive = pack(folder.path(), BYTES_MAX).unwrap();
        assert_eq!(contents(&archive)[1].0, name);
    }

    #[test]
    fn errors_name_the_file() {
        let check = |path: &Path, bytes_max: u64, expected: &str| {
            let error = pack(path, bytes_max).unwrap_err();
            assert_eq!(error.code(), 2);
            assert!(error.to_string().contains(expected), "{error}");
        };
        let noise: String = (0..4000_u32).map(|i| sha256_hex(&i.to_le_bytes())).collect();
        let large = folder(&[("small", "x"), ("data/noise", &noise)]);
        check(large.path(), 10_000, "largest files: data/noise (256 kB), small (1 B)");
        let broken = folder(&[("a", "x")]);
        std::os::unix::fs::symlink("nowhere", broken.path().join("link")).unwrap();
        check(broken.path(), BYTES_MAX, "link");
        let circle = folder(&[("a", "x")]);
        std::os::unix::fs::symlink(".", circle.path().join("circle")).unwrap();
        check(circle.path(), BYTES_MAX, "circle");
        check(folder(&[("b/.git/x", "x")]).path(), BYTES_MAX, "it contains no files");
        check(Path::new("/no/such/folder"), BYTES_MAX, "cannot read /no/such/folder");
    }
}
