//! Unpacks an archive of a program's files, refusing entries that leave the target directory.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use flate2::read::GzDecoder;
use rustix::io::Errno;
use tar::{Archive, EntryType};

/// Error while unpacking an archive.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnpackError {
    /// The archive is corrupt, or a file cannot be written.
    #[error("{path:?}: {source}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The archive would write outside the directory, or link to files outside.
    #[error("{path:?} {reason}")]
    Unsafe { path: PathBuf, reason: String },
}

impl UnpackError {
    /// Returns `true` if the disk is full, read-only or defective. Reading the archive, which is in
    /// memory, never fails in this way.
    pub(super) fn is_disk_failure(&self) -> bool {
        use io::ErrorKind;
        let Self::Io { source, .. } = self else { return false };
        let kinds =
            [ErrorKind::StorageFull, ErrorKind::QuotaExceeded, ErrorKind::ReadOnlyFilesystem];
        kinds.contains(&source.kind()) || Errno::from_io_error(source) == Some(Errno::IO)
    }
}

/// A link, which is created after all files are written.
enum Link {
    Hard(PathBuf),
    Symbolic(PathBuf),
}

/// Unpacks a tar.gz archive: regular files with their executable permission, directories, and links
/// that stay inside. Replaces `folder` as a whole, and only if everything was unpacked.
///
/// # Errors
///
/// Fails if the archive contains another kind of entry, or a path outside the directory.
pub(super) fn unpack(archive: &[u8], folder: &Path) -> Result<(), UnpackError> {
    let io_error = |source| UnpackError::Io { path: folder.to_owned(), source };
    let parent = folder.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).map_err(io_error)?;
    let staging =
        tempfile::Builder::new().prefix(".context-").tempdir_in(parent).map_err(io_error)?;
    unpack_into(archive, staging.path())?;
    fs::set_permissions(staging.path(), fs::Permissions::from_mode(0o755)).map_err(io_error)?;
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error(error)),
        _ => {}
    }
    fs::rename(staging.keep(), folder).map_err(io_error)
}

/// Creates links last, so that files are never written through a link.
fn unpack_into(archive: &[u8], root: &Path) -> Result<(), UnpackError> {
    let archive_error = |source| UnpackError::Io { path: "the archive".into(), source };
    let mut archive = Archive::new(GzDecoder::new(archive));
    let mut links = vec![];
    for entry in archive.entries().map_err(archive_error)? {
        let mut entry = entry.map_err(archive_error)?;
        let path = entry.path().map_err(archive_error)?.into_owned();
        let path = relative_path(&path, "is outside of the directory")?;
        let io_error = |source| UnpackError::Io { path: path.clone(), source };
        let target = root.join(&path);
        let header = entry.header();
        match header.entry_type() {
            EntryType::Directory => fs::create_dir_all(&target).map_err(io_error)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let is_executable = header.mode().map_err(io_error)? & 0o111 != 0;
                write(&target, &mut entry, is_executable).map_err(io_error)?;
            }
            kind @ (EntryType::Link | EntryType::Symlink) => {
                let to = entry.link_name().map_err(io_error)?.unwrap_or_default().into_owned();
                let is_hard = kind == EntryType::Link;
                links.push((path, if is_hard { Link::Hard(to) } else { Link::Symbolic(to) }));
            }
            // Metadata of pax for the whole archive.
            EntryType::XGlobalHeader => {}
            _ => {
                let reason = "is neither a file, a directory nor a link".into();
                return Err(UnpackError::Unsafe { path, reason });
            }
        }
    }
    for (path, _) in &links {
        let parent = root.join(path).parent().map(Path::to_owned).unwrap_or_default();
        let io_error = |source| UnpackError::Io { path: path.clone(), source };
        fs::create_dir_all(parent).map_err(io_error)?;
    }
    link_all(root, &links)
}

fn write(target: &Path, from: &mut impl Read, is_executable: bool) -> io::Result<()> {
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = fs::File::create(target)?;
    io::copy(from, &mut file)?;
    let mode = if is_executable { 0o755 } else { 0o644 };
    file.set_permissions(fs::Permissions::from_mode(mode))
}

fn link_all(root: &Path, links: &[(PathBuf, Link)]) -> Result<(), UnpackError> {
    for (path, link) in links {
        let io_error = |source| UnpackError::Io { path: path.clone(), source };
        if let Link::Hard(to) = link {
            let to = relative_path(to, "is a link to a path outside of the directory")?;
            fs::hard_link(root.join(to), root.join(path)).map_err(io_error)?;
        }
    }
    for (path, link) in links {
        let io_error = |source| UnpackError::Io { path: path.clone(), source };
        if let Link::Symbolic(to) = link {
            check_link_target(path, to)?;
            std::os::unix::fs::symlink(to, root.join(path)).map_err(io_error)?;
        }
    }
    // A link may still lead outside in combination, such as `..` after another link.
    let io_error = |source| UnpackError::Io { path: root.to_owned(), source };
    let real = root.canonicalize().map_err(io_error)?;
    for (path, _) in links {
        let is_outside = |real_path: PathBuf| !real_path.starts_with(&real);
        let leads_out = root.join(path).canonicalize().is_ok_and(is_outside);
        if leads_out {
            let reason = "is a link to a path outside of the directory".into();
            return Err(UnpackError::Unsafe { path: path.clone(), reason });
        }
    }
    Ok(())
}

/// Returns `path` without `.` components; refuses `..` and absolute paths.
fn relative_path(path: &Path, reason: &str) -> Result<PathBuf, UnpackError> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            _ => {
                let (path, reason) = (path.to_owned(), reason.to_owned());
                return Err(UnpackError::Unsafe { path, reason });
            }
        }
    }
    Ok(clean)
}

/// Checks a link's target by its components alone, without the file system.
fn check_link_target(path: &Path, to: &Path) -> Result<(), UnpackError> {
    let mut depth = path.components().count().saturating_sub(1);
    for part in to.components() {
        let next = match part {
            Component::Normal(_) => depth.checked_add(1),
            Component::CurDir => Some(depth),
            Component::ParentDir => depth.checked_sub(1),
            Component::RootDir | Component::Prefix(_) => None,
        };
        let Some(next) = next else {
            let reason = format!("is a link to {to:?}, which is outside of the directory");
            return Err(UnpackError::Unsafe { path: path.to_owned(), reason });
        };
        depth = next;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tar::{Builder, Header};

    use super::*;

    /// An entry: kind, path, and contents or link target.
    type Entry<'a> = (EntryType, &'a str, &'a str);

    const FILE: EntryType = EntryType::Regular;
    const LINK: EntryType = EntryType::Symlink;
    const HARD: EntryType = EntryType::Link;

    /// Creates an archive with paths unchanged, as a malicious tool would.
    fn archive(entries: &[Entry<'_>]) -> Vec<u8> {
        let mut builder = Builder::new(GzEncoder::new(vec![], Compression::fast()));
        for (kind, path, content) in entries {
            let mut header = Header::new_gnu();
            let raw = header.as_old_mut();
            raw.name[..path.len()].copy_from_slice(path.as_bytes());
            let is_link = matches!(*kind, LINK | HARD);
            if is_link {
                raw.linkname[..content.len()].copy_from_slice(content.as_bytes());
            }
            let content = if is_link { "" } else { content };
            header.set_entry_type(*kind);
            header.set_mode(if path.ends_with("run") { 0o4_775 } else { 0o600 });
            header.set_size(content.len() as u64);
            header.set_cksum();
            builder.append(&header, content.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap().finish().unwrap()
    }

    fn refused(entries: &[Entry<'_>], expected: &str) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("deep/er/context");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("before"), "").unwrap();
        let error = unpack(&archive(entries), &folder).unwrap_err().to_string();
        assert!(error.contains(expected), "{entries:?}: {error}");
        // The previous contents are unchanged, and nothing was created elsewhere.
        let names = |path: &Path| -> Vec<_> {
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect()
        };
        assert_eq!(names(&folder), ["before"], "{entries:?}");
        assert_eq!(names(&root.path().join("deep/er")), ["context"], "{entries:?}");
        assert_eq!(names(&root.path().join("deep")), ["er"], "{entries:?}");
    }

    #[test]
    fn files_keep_paths_and_executable_permission() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("context");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("before"), "").unwrap();
        let entries = [
            (EntryType::Directory, "./", ""),
            (LINK, "link", "src/main.py"),
            (HARD, "src/other", "./src/main.py"),
            (FILE, "./bin/run", "#!/bin/sh"),
            (FILE, "src/main.py", "print()"),
            (EntryType::Directory, "empty/", ""),
            (LINK, "src/up", "../bin/run"),
            (LINK, "later", "made/by/the/program"),
        ];
        unpack(&archive(&entries), &folder).unwrap();
        let mode = |path: &str| folder.join(path).metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("bin/run"), mode("src/main.py"), mode("")), (0o755, 0o644, 0o755));
        for path in ["link", "src/other", "src/main.py"] {
            assert_eq!(fs::read_to_string(folder.join(path)).unwrap(), "print()", "{path}");
        }
        assert_eq!(fs::read_to_string(folder.join("src/up")).unwrap(), "#!/bin/sh");
        assert!(folder.join("empty").is_dir());
        assert!(!folder.join("before").exists());
    }

    #[test]
    fn paths_outside_are_refused() {
        refused(&[(FILE, "/etc/x", "x")], "is outside");
        refused(&[(FILE, "a", "x"), (FILE, "../x", "x")], "is outside");
        refused(&[(FILE, "a/../../x", "x")], "is outside");
        refused(&[(EntryType::Directory, "..", "")], "is outside");
        refused(&[(LINK, "x", "/etc/passwd")], "which is outside");
        refused(&[(LINK, "a/x", "../../x")], "which is outside");
        refused(&[(HARD, "x", "/etc/passwd")], "outside");
        refused(&[(HARD, "x", "../context/before")], "outside");
        // Inside by its components, but outside through the link before it.
        let through = [(FILE, "x", ""), (LINK, "a/b/top", "../.."), (LINK, "y", "a/b/top/../..")];
        refused(&through, "outside");
        let through = [(FILE, "f/g", ""), (LINK, "a/b/l", "../../"), (LINK, "y", "a/b/l/../../er")];
        refused(&through, "outside");
    }

    #[test]
    fn files_are_not_written_through_links() {
        refused(&[(LINK, "d", "e"), (FILE, "d/x", "x")], "\"d\"");
        refused(&[(LINK, "d", "."), (LINK, "d/x", "y")], "\"d\"");
    }

    #[test]
    fn other_entry_types_are_refused() {
        refused(&[(EntryType::Fifo, "x", "")], "neither");
        refused(&[(EntryType::Char, "x", "")], "neither");
    }

    #[test]
    fn disk_failures_are_distinguished() {
        let check = |source: io::Error, expected: bool| {
            let error = UnpackError::Io { path: "x".into(), source };
            assert_eq!(error.is_disk_failure(), expected, "{error}");
        };
        check(Errno::NOSPC.into(), true);
        check(Errno::DQUOT.into(), true);
        check(Errno::ROFS.into(), true);
        check(Errno::IO.into(), true);
        // A file of the archive where another one needs a directory, and corrupt archives.
        check(Errno::NOTDIR.into(), false);
        check(io::ErrorKind::InvalidData.into(), false);
        check(io::ErrorKind::UnexpectedEof.into(), false);
    }

    #[test]
    fn corrupt_archives_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("context");
        assert!(unpack(b"no archive", &folder).is_err());
        let bytes = archive(&[(FILE, "a", &"x".repeat(100_000))]);
        assert!(unpack(&bytes[..bytes.len() / 2], &folder).is_err());
        assert!(!folder.exists());
    }
}
