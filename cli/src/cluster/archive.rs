//! A program's files as one archive. The same files give the same bytes, on any machine.
//!
//! ```text
//!  folder -- walk, .stokerignore --> sorted entries -- tar, gzip --> bytes -- SHA-256 --> name
//! ```

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use flate2::{Compression, GzBuilder};
use stoker_storage::hash::sha256_hex;

use crate::failure::Failure;

/// Compressed bytes that an archive may have: each pod of each attempt loads it.
pub(crate) const BYTES_MAX: u64 = 95_000_000;

/// The file whose patterns, in gitignore's syntax, say what is not sent.
const IGNORE_FILE: &str = ".stokerignore";
/// What no program needs: the history, and what `stoker run` left.
const NEVER_SENT: [&str; 2] = [".git", ".stoker"];
/// Of the files, how many are named where they are too large.
const LARGEST_NAMED: usize = 5;

/// Files that can be sent.
#[derive(Debug)]
pub(crate) struct Archive {
    /// A gzipped tar.
    pub(crate) bytes: Vec<u8>,
    /// Of the bytes, in hex.
    pub(crate) sha256: String,
    /// Files in it.
    pub(crate) num_files: usize,
    /// Their size before it was compressed.
    pub(crate) bytes_unpacked: u64,
}

/// One file or folder.
#[derive(Debug)]
struct Entry {
    /// Where it lies.
    path: PathBuf,
    /// Its path in the archive.
    name: PathBuf,
    is_folder: bool,
    is_program: bool,
    bytes: u64,
}

/// Packs a folder's files, or a single program.
pub(crate) fn pack(path: &Path, bytes_max: u64) -> Result<Archive, Failure> {
    let metadata = std::fs::metadata(path)
        .map_err(|error| Failure::Input(say(path, "cannot be read", error)))?;
    let entries = if metadata.is_dir() { walk(path)? } else { vec![program(path, &metadata)?] };
    let files = || entries.iter().filter(|it| !it.is_folder);
    if files().next().is_none() {
        return Err(Failure::Input(format!("{}: no file to send", path.display())));
    }
    let limited = Limited { bytes: Vec::new(), bytes_max };
    // No name, no time: gzip's header would differ.
    let gzip = GzBuilder::new().mtime(0).write(limited, Compression::default());
    let mut tar = tar::Builder::new(gzip);
    let packed = entries.iter().try_for_each(|entry| append(&mut tar, entry));
    let packed = packed.and_then(|()| tar.into_inner()?.finish());
    let bytes = match packed {
        Ok(limited) => limited.bytes,
        Err(error) if error.kind() == std::io::ErrorKind::FileTooLarge => {
            return Err(too_large(path, &entries, bytes_max));
        }
        Err(error) => return Err(Failure::Input(say(path, "cannot be packed", error))),
    };
    Ok(Archive {
        sha256: sha256_hex(&bytes),
        num_files: files().count(),
        bytes_unpacked: files().map(|it| it.bytes).sum(),
        bytes,
    })
}

fn say(path: &Path, what: &str, error: impl std::fmt::Display) -> String {
    format!("{} {what}: {error}", path.display())
}

fn program(path: &Path, metadata: &std::fs::Metadata) -> Result<Entry, Failure> {
    let name = path.file_name().filter(|_| metadata.is_file());
    let name =
        name.ok_or_else(|| Failure::Input(format!("{} is no file and no folder", path.display())))?;
    Ok(Entry {
        path: path.to_owned(),
        name: PathBuf::from(name),
        is_folder: false,
        is_program: true,
        bytes: metadata.len(),
    })
}

/// All that is sent of a folder, sorted. Links are followed: what they lead to is sent in their
/// place.
fn walk(folder: &Path) -> Result<Vec<Entry>, Failure> {
    let walk = ignore::WalkBuilder::new(folder)
        .standard_filters(false)
        .add_custom_ignore_filename(IGNORE_FILE)
        .follow_links(true)
        .filter_entry(|it| it.depth() == 0 || NEVER_SENT.iter().all(|name| it.file_name() != *name))
        .build();
    let mut entries = Vec::new();
    for found in walk {
        let found = found.map_err(|error| {
            Failure::Input(say(
                folder,
                "cannot be packed",
                format!("{error}; mend it or name it in {IGNORE_FILE}"),
            ))
        })?;
        if let Some(error) = found.error() {
            return Err(Failure::Input(say(found.path(), "has a pattern that is none", error)));
        }
        if found.depth() > 0 {
            entries.push(entry(folder, &found)?);
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn entry(folder: &Path, found: &ignore::DirEntry) -> Result<Entry, Failure> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = found.path();
    let refuse = |why: String| Failure::Input(say(path, "cannot be sent", why));
    let metadata = std::fs::metadata(path).map_err(|error| refuse(error.to_string()))?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(refuse(format!("it is no file and no folder; name it in {IGNORE_FILE}")));
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
    // Whose they are and when they were written says nothing of the program.
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
        return Err(named(std::io::Error::other("it became shorter while it was read")));
    }
    Ok(())
}

fn too_large(path: &Path, entries: &[Entry], bytes_max: u64) -> Failure {
    let mut files: Vec<&Entry> = entries.iter().filter(|it| !it.is_folder).collect();
    files.sort_by_key(|it| std::cmp::Reverse(it.bytes));
    let largest: Vec<String> = files
        .iter()
        .take(LARGEST_NAMED)
        .map(|it| format!("{} ({})", it.name.display(), super::text::bytes(it.bytes)))
        .collect();
    Failure::Input(format!(
        "{}: packed, its files are more than {}, the most that is sent; the largest: {}; name what \
         the program does not need in {IGNORE_FILE}, and let it read data from a volume or the \
         storage",
        path.display(),
        super::text::bytes(bytes_max),
        largest.join(", ")
    ))
}

/// Bytes that may not grow without end.
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

    /// Names, modes and texts in an archive, in their order.
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
        let texts: Vec<(&str, &str)> = files.iter().map(|it| (*it, "text")).collect();
        let folder = folder(&texts);
        std::fs::write(folder.path().join(IGNORE_FILE), ignore).unwrap();
        let archive = pack(folder.path(), BYTES_MAX).unwrap();
        let names: Vec<String> =
            contents(&archive).into_iter().map(|it| it.0).filter(|it| it != IGNORE_FILE).collect();
        assert_eq!(names, expected, "{ignore:?}");
    }

    #[test]
    fn what_is_ignored_follows_the_rules_of_gitignore() {
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
    fn a_gitignore_does_not_count_and_a_nested_ignore_file_does() {
        let folder = folder(&[
            (".gitignore", "model.bin"),
            ("model.bin", "needed"),
            ("sub/.stokerignore", "x"),
            ("sub/x", "not"),
            ("x", "here"),
        ]);
        let names: Vec<String> =
            contents(&pack(folder.path(), BYTES_MAX).unwrap()).into_iter().map(|it| it.0).collect();
        assert_eq!(names, [".gitignore", "model.bin", "sub", "sub/.stokerignore", "x"]);
    }

    #[test]
    fn the_same_files_give_the_same_bytes_whenever_and_wherever_they_were_written() {
        let files = [("b/c", "1"), ("a", "2"), ("B", "3")];
        let first = folder(&files);
        let reversed: Vec<(&str, &str)> = files.into_iter().rev().collect();
        let second = folder(&reversed);
        let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let file = std::fs::File::options().write(true).open(second.path().join("a")).unwrap();
        file.set_modified(old).unwrap();
        let of = |it: &tempfile::TempDir| pack(it.path(), BYTES_MAX).unwrap();
        assert_eq!(of(&first).bytes, of(&second).bytes);
        // The header says nothing of the machine or the hour.
        assert_eq!(of(&first).bytes[..10], [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255]);
        std::fs::write(second.path().join("a"), "4").unwrap();
        assert_ne!(of(&first).sha256, of(&second).sha256);
    }

    #[test]
    fn programs_stay_programs_and_links_become_what_they_lead_to() {
        let folder = folder(&[("run", "#!"), ("text", "x")]);
        let run = folder.path().join("run");
        std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink("run", folder.path().join("link")).unwrap();
        let archive = pack(folder.path(), BYTES_MAX).unwrap();
        let found: BTreeMap<String, (u32, String)> =
            contents(&archive).into_iter().map(|(name, mode, text)| (name, (mode, text))).collect();
        assert_eq!(found["run"], (0o755, "#!".to_owned()));
        assert_eq!(found["link"], (0o755, "#!".to_owned()));
        assert_eq!(found["text"], (0o644, "x".to_owned()));
        assert_eq!((archive.num_files, archive.bytes_unpacked), (3, 5));
    }

    #[test]
    fn a_single_program_can_be_run() {
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
    fn what_cannot_be_sent_is_named() {
        let check = |path: &Path, bytes_max: u64, expected: &str| {
            let error = pack(path, bytes_max).unwrap_err();
            assert_eq!(error.code(), 2);
            assert!(error.to_string().contains(expected), "{error}");
        };
        let noise: String = (0..4000_u32).map(|i| sha256_hex(&i.to_le_bytes())).collect();
        let large = folder(&[("small", "x"), ("data/noise", &noise)]);
        check(large.path(), 10_000, "the largest: data/noise (256 kB), small (1 B)");
        let broken = folder(&[("a", "x")]);
        std::os::unix::fs::symlink("nowhere", broken.path().join("link")).unwrap();
        check(broken.path(), BYTES_MAX, "link");
        let circle = folder(&[("a", "x")]);
        std::os::unix::fs::symlink(".", circle.path().join("circle")).unwrap();
        check(circle.path(), BYTES_MAX, "circle");
        check(folder(&[("b/.git/x", "x")]).path(), BYTES_MAX, "no file to send");
        check(Path::new("/no/such/folder"), BYTES_MAX, "cannot be read");
    }
}
