"""A federation on real machines: certificates, keys, and the Flower processes of server and site.

Flower's SuperLink has one port for three interfaces: the sites', which checks a site's key, and two
more that start programs and ask nobody who they are. So the SuperLink listens on this machine only,
and a gate in front of it passes on what admitted sites send, and nothing else.

    certificates.py   the authority of a federation and the server's certificate
    keys.py           the key of a site, files that only their owner may read
    address.py        HOST:PORT
    folders.py        what lies where at the server and at a site
    gate.py           the one door to the network
    knock.py          why a site cannot come in, in one sentence
    children.py       Flower's processes: environment, log, end
    supervise.py      when to try again
    server.py site.py the two commands
"""
