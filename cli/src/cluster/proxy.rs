//! Hosts that bypass the proxy of the environment.

use std::net::IpAddr;

/// Returns `true` if `NO_PROXY` matches the host, or if it is the local host.
pub(super) fn is_bypassed(host: Option<&str>) -> bool {
    let names = ["NO_PROXY", "no_proxy"];
    let list = names.iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default();
    host.is_some_and(|host| is_listed(host, &list))
}

fn is_listed(host: &str, list: &str) -> bool {
    let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
    let address: Option<IpAddr> = host.parse().ok();
    if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
        return true;
    }
    list.split(',').map(str::trim).filter(|item| !item.is_empty()).any(|item| {
        let domain = item.trim_start_matches("*.").trim_start_matches('.').to_ascii_lowercase();
        item == "*"
            || host == domain
            || (address.is_none() && host.ends_with(&format!(".{domain}")))
            || address.is_some_and(|address| is_in(address, item))
    })
}

/// Returns `true` if `address` is in `network`, such as `10.0.0.0/8`.
fn is_in(address: IpAddr, network: &str) -> bool {
    let Some((start, len)) = network.split_once('/') else { return false };
    let (Ok(start), Ok(len)) = (start.parse::<IpAddr>(), len.parse::<u32>()) else { return false };
    let bits = |address: IpAddr| match address {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    };
    let ((a, width_a), (b, width_b)) = (bits(address), bits(start));
    width_a == width_b && len <= width_a && (a ^ b).checked_shr(128 - len).unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(host: &str, list: &str, expected: bool) {
        assert_eq!(is_listed(host, list), expected, "{host} {list}");
    }

    #[test]
    fn hosts_are_matched_by_name_domain_and_network() {
        check("127.0.0.1", "", true);
        check("[::1]", "", true);
        check("localhost", "", true);
        check("10.1.2.3", "", false);
        check("10.1.2.3", "192.168.0.0/16, 10.0.0.0/8", true);
        check("10.1.2.3", "10.2.0.0/16", false);
        check("10.1.2.3", "10.1.2.3", true);
        check("10.1.2.3", "0.0.0.0/0", true);
        check("fd00::1", "10.0.0.0/8,fd00::/8", true);
        check("k8s.corp.example", "corp.example", true);
        check("k8s.corp.example", ".corp.example", true);
        check("k8s.corp.example", "*.corp.example", true);
        check("mycorp.example", "corp.example", false);
        check("k8s.corp.example", "*", true);
    }
}
