//! Input files of a batch inference job: name patterns, and lists of the local files that match.

mod outputs;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

pub use self::outputs::{JobOutput, follow_manifests, list_local};

/// Maximum depth of directories below the input's directory, to end cycles of symbolic links.
const DEPTH_MAX: usize = 32;
/// Reason for refusing a file name.
pub const NOT_UTF8: &str = "a name is not UTF-8; rename the file";

/// An input file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedFile {
    /// Path relative to the input's directory.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// Describes the first difference in names and sizes between recorded files and `listed`. Both are
/// sorted by name.
///
/// # Examples
///
/// ```
/// use stoker_storage::input::{ListedFile, first_difference};
///
/// let listed = [ListedFile { name: "a.csv".into(), bytes: 3 }];
/// assert_eq!(first_difference(&[("a.csv", 3)], &listed), None);
/// let difference = first_difference(&[("a.csv", 2)], &listed).unwrap();
/// assert_eq!(difference, "expected a.csv with 2 bytes, found a.csv with 3 bytes");
/// ```
pub fn first_difference(before: &[(&str, u64)], listed: &[ListedFile]) -> Option<String> {
    let now: Vec<_> = listed.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
    let describe = |file: Option<&(&str, u64)>| {
        file.map_or("nothing".to_owned(), |(name, bytes)| format!("{name} with {bytes} bytes"))
    };
    let positions = 0..before.len().max(now.len());
    let (before, now) =
        positions.map(|i| (before.get(i), now.get(i))).find(|(before, now)| before != now)?;
    Some(format!("expected {}, found {}", describe(before), describe(now)))
}

/// One glob pattern for each level below a directory; without levels, all files below the directory
/// match.
#[derive(Clone, Debug)]
pub struct Pattern(pub Vec<String>);

impl Pattern {
    /// Splits a path before its first name with a wildcard. Returns the path of the directory, and
    /// the pattern of the names after it.
    ///
    /// # Examples
    ///
    /// ```
    /// use stoker_storage::input::Pattern;
    ///
    /// let (folder, pattern) = Pattern::split("flowers/20*/*.csv");
    /// assert_eq!(folder, "flowers");
    /// assert_eq!(pattern.0, ["20*", "*.csv"]);
    /// assert_eq!(Pattern::split("/*.csv").0, "/");
    /// ```
    pub fn split(path: &str) -> (String, Self) {
        let segments: Vec<&str> = path.split('/').collect();
        let num_literal =
            segments.iter().position(|name| has_wildcard(name)).unwrap_or(segments.len());
        let folder = segments[..num_literal].join("/");
        let is_root = folder.is_empty() && path.starts_with('/');
        let pattern = segments[num_literal..].iter().map(|name| (*name).to_owned()).collect();
        (if is_root { "/".to_owned() } else { folder }, Self(pattern))
    }

    /// Returns `true` if a path matches. Names that start with `.` or `_` only match patterns that
    /// do too.
    pub fn is_match(&self, path: &str) -> bool {
        let mut names = path.split('/').enumerate();
        (self.0.is_empty() || names.clone().count() == self.0.len())
            && names.all(|(level, name)| self.may_match(level, name))
    }

    /// Returns `true` if a name on this level may be part of a matching path.
    fn may_match(&self, level: usize, name: &str) -> bool {
        let is_hidden = |name: &str| name.starts_with(['.', '_']);
        if self.0.is_empty() {
            return !is_hidden(name);
        }
        self.0.get(level).is_some_and(|pattern| {
            (!is_hidden(name) || is_hidden(pattern))
                && glob_matches(pattern.as_bytes(), name.as_bytes())
        })
    }

    /// Returns the matching files below a directory. Skips the directory `without`, also if it is
    /// reached by a symbolic link. The files are not sorted.
    ///
    /// # Errors
    ///
    /// Fails, with the path, if a file or directory that may match cannot be read.
    pub fn list_files(
        &self,
        folder: &Path,
        without: Option<&Path>,
    ) -> Result<Vec<ListedFile>, String> {
        let without = without.and_then(|path| fs::metadata(path).ok());
        let without = without.as_ref().map(identity);
        let mut walk = Walk { pattern: self, without, files: vec![] };
        walk.level(folder, "", 0)?;
        Ok(walk.files)
    }
}

/// Recursive listing of a directory.
struct Walk<'a> {
    pattern: &'a Pattern,
    /// Identity of the directory to skip.
    without: Option<(u64, u64)>,
    files: Vec<ListedFile>,
}

impl Walk<'_> {
    fn level(&mut self, folder: &Path, below: &str, depth: usize) -> Result<(), String> {
        let failed = |error: io::Error| format!("{}: {error}", folder.display());
        if depth > DEPTH_MAX {
            return Err(format!("{} exceeds {DEPTH_MAX} levels of directories", folder.display()));
        }
        // A literal name can be opened without listing the directory.
        if let Some(name) = self.pattern.0.get(depth).filter(|name| !has_wildcard(name)) {
            return self.entry(folder, below, name, depth);
        }
        for entry in fs::read_dir(folder).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if self.pattern.may_match(depth, &name.to_string_lossy()) {
                let path = folder.join(&name);
                let name =
                    name.to_str().ok_or_else(|| format!("{}: {NOT_UTF8}", path.display()))?;
                self.entry(folder, below, name, depth)?;
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        folder: &Path,
        below: &str,
        name: &str,
        depth: usize,
    ) -> Result<(), String> {
        let (here, path) = (folder.join(name), join(below, name));
        let metadata = match fs::metadata(&here) {
            Ok(metadata) => metadata,
            // Deleted since the directory was listed, or never there.
            Err(_) if is_missing(&here) => return Ok(()),
            // A file that cannot be accessed must not be skipped silently.
            Err(error) => return Err(format!("{}: {error}", here.display())),
        };
        let levels = self.pattern.0.len();
        if metadata.is_file() && (levels == 0 || depth + 1 == levels) {
            self.files.push(ListedFile { name: path, bytes: metadata.len() });
        } else if metadata.is_dir()
            && (levels == 0 || depth + 1 < levels)
            && self.without != Some(identity(&metadata))
        {
            self.level(&here, &path, depth + 1)?;
        }
        Ok(())
    }
}

/// Returns the numbers of the device and of the inode, which are the same for all paths of a
/// directory.
fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Returns `true` if nothing has this path, not even a dangling symbolic link.
fn is_missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
}

/// Returns `true` if a name contains wildcards.
fn has_wildcard(name: &str) -> bool {
    name.contains(['*', '?'])
}

/// Returns `true` if `name` matches `pattern`: `*` is any text, `?` any byte.
fn glob_matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.first(), name.first()) {
        (None, None) => true,
        (Some(b'*'), _) => (0..=name.len()).any(|skip| glob_matches(&pattern[1..], &name[skip..])),
        (Some(b'?'), Some(_)) => glob_matches(&pattern[1..], &name[1..]),
        (Some(one), Some(other)) => one == other && glob_matches(&pattern[1..], &name[1..]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pattern: &str, name: &str, expected: bool) {
        assert_eq!(glob_matches(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
    }

    #[test]
    fn patterns_match_complete_names() {
        check("*.csv", "a.csv", true);
        check("*.csv", "a.csv.gz", false);
        check("a?c*", "abc", true);
        check("a?c*", "ac", false);
        check("*a*b*", "xxaxxbxx", true);
        check("", "", true);
        check("*", "", true);
        check("ä?", "äb", true);
    }

    #[test]
    fn only_matching_files_are_accessed() {
        use std::os::unix::ffi::OsStrExt as _;

        let folder = tempfile::tempdir().unwrap();
        let odd = std::ffi::OsStr::from_bytes(b"\xff.txt");
        for name in ["a.csv", "deep/b.csv", "deep/own/c.csv", "_state/d.csv"].map(Path::new) {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        fs::write(folder.path().join(odd), "x").unwrap();
        for location in ["broken", "_state/broken"] {
            std::os::unix::fs::symlink("nowhere", folder.path().join(location)).unwrap();
        }
        let own = folder.path().join("deep/own");
        let check = |pattern: &[&str], expected: Result<&[&str], &str>| {
            let pattern = Pattern(pattern.iter().map(|level| (*level).to_owned()).collect());
            match (pattern.list_files(folder.path(), Some(&own)), expected) {
                (Ok(files), Ok(expected)) => {
                    let names: Vec<_> = files.iter().map(|file| file.name.as_str()).collect();
                    assert_eq!(names, expected);
                }
                (Err(error), Err(expected)) => assert!(error.contains(expected), "{error}"),
                (files, expected) => panic!("{files:?} is not {expected:?}"),
            }
        };
        check(&["a.csv"], Ok(&["a.csv"]));
        check(&["*.csv"], Ok(&["a.csv"]));
        check(&["d*", "*.csv"], Ok(&["deep/b.csv"]));
        check(&["deep", "*", "*.csv"], Ok(&[]));
        check(&["deep", "nothing"], Ok(&[]));
        check(&["b*"], Err("broken: "));
        check(&["*.txt"], Err("not UTF-8"));
        fs::remove_file(folder.path().join(odd)).unwrap();
        check(&[], Err("broken: "));
        fs::remove_file(folder.path().join("broken")).unwrap();
        let pattern = Pattern(vec![]);
        assert_eq!(pattern.list_files(folder.path(), Some(&own)).unwrap().len(), 2);
    }

    #[test]
    fn skipped_directory_is_found_through_symbolic_links() {
        let folder = tempfile::tempdir().unwrap();
        let (input, own) = (folder.path().join("in"), folder.path().join("elsewhere/own"));
        fs::create_dir_all(&input).unwrap();
        fs::create_dir_all(&own).unwrap();
        for file in [input.join("a.csv"), own.join("b.csv"), own.with_file_name("c.csv")] {
            fs::write(file, "x").unwrap();
        }
        std::os::unix::fs::symlink(&own, input.join("direct")).unwrap();
        std::os::unix::fs::symlink("../elsewhere", input.join("parent")).unwrap();
        let names = |without: Option<&Path>| {
            let files = Pattern(vec![]).list_files(&input, without).unwrap();
            let mut names: Vec<String> = files.into_iter().map(|file| file.name).collect();
            names.sort();
            names
        };
        assert_eq!(names(Some(&own)), ["a.csv", "parent/c.csv"]);
        assert_eq!(names(Some(&input.join("direct"))), ["a.csv", "parent/c.csv"]);
        assert_eq!(names(Some(Path::new("/nothing"))).len(), 4);
        assert_eq!(names(None).len(), 4);
    }
}
