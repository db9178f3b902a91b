//! Programs that a file names.

use std::path::{Path, PathBuf};

use super::process;
use crate::failure::Failure;

/// Fails if `program`, the value of `field`, is not found. A relative path begins in `folder`.
///
/// # Errors
///
/// [`Failure::Input`].
pub(crate) fn require_program(field: &str, program: &str, folder: &Path) -> Result<(), Failure> {
    let absolute = |path: &Path| {
        let absolute = std::path::absolute(path);
        absolute.unwrap_or_else(|_| path.to_owned()).display().to_string()
    };
    let path = folder.join(program);
    let is_found = match program.contains('/') {
        true => is_program(&path),
        false => find_program(program).is_some(),
    };
    if is_found {
        return Ok(());
    }
    let why = match program.contains('/') {
        false => {
            "no such program next to `stoker` or on PATH; install it or write its path".to_owned()
        }
        true if path.is_file() => {
            format!("it is not executable; run `chmod +x {}`", absolute(&path))
        }
        true if path.is_dir() => "it is a directory; write the path of a program".to_owned(),
        true if program.starts_with('/') => {
            "no such program; build it or correct its path".to_owned()
        }
        true => format!(
            "no such program in {}; build it, or run this command in the directory from which its \
             path begins",
            absolute(folder)
        ),
    };
    Err(Failure::Input(format!("{field} is `{program}`: {why}")))
}

/// Returns the executable file of `program`: a path, or a name next to `stoker` or on `PATH`.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(|path| is_program(path));
    }
    let path = process::search_path(&std::env::current_exe().ok()?);
    let mut paths = std::env::split_paths(&path).map(|folder| folder.join(program));
    paths.find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata()
        .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_program_searches_the_path() {
        assert!(find_program("sh").is_some());
        assert!(find_program("/bin/sh").is_some());
        assert!(find_program("no-such-program-at-all").is_none());
        assert!(find_program("/tmp").is_none());
    }

    #[test]
    fn missing_program_names_its_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, file) = (folder.path(), folder.path().join("train.py"));
        std::fs::write(&file, "").unwrap();
        require_program("command", "/bin/sh", folder).unwrap();
        let check = |program: &str, expected: &str| {
            let error = require_program("command", program, folder).unwrap_err().to_string();
            assert!(error.starts_with(&format!("command is `{program}`: {expected}")), "{error}");
        };
        check("no-such-program-at-all", "no such program next to `stoker` or on PATH");
        check("/no/such/program", "no such program; build it");
        check("./train", &format!("no such program in {}; build it", folder.display()));
        let remedy = format!("it is not executable; run `chmod +x {}`", file.display());
        check("./train.py", &remedy);
        check(&folder.display().to_string(), "it is a directory; write the path of a program");
        check(&file.display().to_string(), &remedy);
    }
}
