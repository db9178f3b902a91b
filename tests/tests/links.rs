//! The pages are connected: each link leads to a file and a heading that exist, and the index and
//! the book list every page.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use stoker_tests::{files, repository};

fn read(name: &str) -> String {
    std::fs::read_to_string(repository().join(name)).unwrap()
}

/// Returns the lines outside of fenced code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the targets of all links to files and headings of the repository, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = vec![];
    for (number, line) in prose(text) {
        // Without inline code, which may look like a link.
        let line: String = line.split('`').step_by(2).collect();
        for rest in line.split("](").skip(1) {
            let Some((target, _)) = rest.split_once(')') else { continue };
            if !target.contains("://") {
                links.push((number, target.to_owned()));
            }
        }
    }
    links
}

/// Returns the anchors of all headings, as GitHub and mdBook name them.
fn anchors(text: &str) -> BTreeSet<String> {
    let (mut anchors, mut counts) = (BTreeSet::new(), BTreeMap::new());
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let title = title.trim().to_lowercase();
        let name = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let name: String = name.map(|c| if c == ' ' { '-' } else { c }).collect();
        let count: &mut u32 = counts.entry(name.clone()).or_default();
        anchors.insert(if *count == 0 { name } else { format!("{name}-{count}") });
        *count += 1;
    }
    anchors
}

/// Checks a link of the page `page`, a path below `root`.
///
/// # Errors
///
/// The reason why the link is broken.
fn check(root: &Path, page: &str, link: &str) -> Result<(), &'static str> {
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let page = root.join(page);
    let target = match path {
        "" => page,
        path => page.parent().unwrap().join(path),
    };
    if !target.exists() {
        return Err("file not found");
    }
    if !anchor.is_empty() {
        let text = std::fs::read_to_string(target).map_err(|_| "not a text file")?;
        if !anchors(&text).contains(anchor) {
            return Err("heading not found");
        }
    }
    Ok(())
}

/// Returns `PAGE:LINE: LINK: REASON` of each broken link.
fn broken(root: &Path, page: &str, text: &str) -> Vec<String> {
    let links = links(text).into_iter();
    let broken =
        links.filter_map(|(line, link)| Some((line, check(root, page, &link).err()?, link)));
    broken.map(|(line, reason, link)| format!("{page}:{line}: {link}: {reason}")).collect()
}

#[test]
fn links_lead_to_files_and_headings() {
    let pages = files(&["*.md"]);
    let all: Vec<String> =
        pages.iter().flat_map(|page| broken(&repository(), page, &read(page))).collect();
    assert!(all.is_empty(), "broken links:\n{}", all.join("\n"));
}

/// Comments and notes of the chart name pages by their paths from the root.
#[test]
fn charts_name_existing_files() {
    for name in files(&["charts"]) {
        let text = read(&name);
        let is_path = |c: char| c.is_alphanumeric() || "-_./#".contains(c);
        let words = text.split(|c| !is_path(c)).map(|word| word.trim_end_matches('.'));
        for word in words.filter(|word| word.contains('/') && word.contains(".md")) {
            let checked = check(&repository(), "README.md", word);
            assert_eq!(checked, Ok(()), "{name}: {word}");
        }
    }
}

#[test]
fn index_and_book_list_every_page() {
    let listed = |name: &str| -> BTreeSet<String> {
        links(&read(name)).into_iter().map(|(_, link)| link).collect()
    };
    let (index, book) = (listed("docs/README.md"), listed("docs/SUMMARY.md"));
    for page in files(&["docs/*.md"]) {
        let page = page.strip_prefix("docs/").unwrap();
        if page == "SUMMARY.md" {
            continue;
        }
        assert!(book.contains(page), "docs/SUMMARY.md does not list {page}");
        let is_listed = page == "README.md" || page.contains('/') || index.contains(page);
        assert!(is_listed, "docs/README.md does not list {page}");
    }
}

#[test]
fn broken_links_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("README.md", "# Main `page`, 2nd\n## Again\n## Again\n```sh\n# no heading\n```\n");
    write("docs/a.md", "# A\n");
    let cases = [
        ("[a](a.md) [top](../README.md#main-page-2nd)", ""),
        ("[again](../README.md#again-1) [own](#a)", ""),
        ("[site](https://example.com/x.md) `[code](x.md)`\n```\n[code](x.md)\n```", ""),
        ("\n[b](b.md)", "docs/a.md:2: b.md: file not found"),
        ("[a](a.md), [b](a.md#b)", "docs/a.md:1: a.md#b: heading not found"),
        ("[c](../README.md#no-heading)", "docs/a.md:1: ../README.md#no-heading: heading not found"),
    ];
    for (text, expected) in cases {
        let found = broken(folder.path(), "docs/a.md", text).join("\n");
        assert_eq!(found, expected, "{text}");
    }
}
